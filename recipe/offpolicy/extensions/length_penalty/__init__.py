"""Length penalties: uniform, within the group, above an anchor or a reference; before or after normalisation."""
