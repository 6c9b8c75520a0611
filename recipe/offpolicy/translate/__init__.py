"""verl's rollout correction, computed by this package from one pass over a batch."""

from .rollout_correction import verl_rollout_correction

__all__ = ["verl_rollout_correction"]
