"""On-policy distillation: a teacher's log-probs teach the failed rollouts of prompts that the policy rarely solves."""

from .eligibility import eligible
from .signal import advantages, k2_loss

__all__ = ["advantages", "eligible", "k2_loss"]
