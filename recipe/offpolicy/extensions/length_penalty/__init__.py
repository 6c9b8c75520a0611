"""Length penalties: uniform, group-relative, or above an anchor or reference length."""
