"""On-policy distillation: a teacher's log-probs supervise failed rollouts of prompts that the policy rarely solves."""

from .signal import advantages, eligible, k2_loss

__all__ = ["advantages", "eligible", "k2_loss"]
