"""Length penalties: uniform, within the group, above an anchor, above a reference; before or after normalisation."""

from .penalties import penalties

__all__ = ["penalties"]
