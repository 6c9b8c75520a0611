"""verl's rollout correction, computed by this package in one pass over the batch."""

from .rollout_correction import verl_rollout_correction

__all__ = ["verl_rollout_correction"]
