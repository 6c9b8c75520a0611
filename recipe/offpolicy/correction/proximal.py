"""Source of pi_old, the proximal policy."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Proximal = Literal["recompute", "bypass", "reuse", "loglinear"]

WITHOUT_FORWARD = ("bypass", "reuse", "loglinear")
"""Sources that need no forward pass for pi_old."""
OF_THE_TRAINER = ("recompute", "reuse")
"""Sources by which pi_old is the policy of the trainer's weights at the start of the step."""


def proximal_log_prob(
    proximal: Proximal, alpha: float | None, *, old_log_prob: Tensor, rollout_log_prob: Tensor, log_prob: Tensor
) -> Tensor:
    """Compute log pi_old as corrections and the base loss read it.

    * ``recompute``: as it was computed by the trainer at the start of the step. Three policies, decoupled PPO.
    * ``bypass``: mu itself, so that PPO's ratio is pi / mu. Two policies.
    * ``reuse``: the current policy, detached. Exact where each batch gets a single gradient step, whose pi it is.
    * ``loglinear``: (1 - alpha) log mu + alpha log pi, detached: between where the data came from and where the
      policy is. An approximation, which costs no forward pass.

    Args:
        old_log_prob: (B, T), read by ``recompute`` alone.
        rollout_log_prob: (B, T), log mu.
        log_prob: (B, T), log pi, detached here.

    Returns:
        (B, T), in the dtype of what it is made of; of ``loglinear`` in float32 or wider.

    Example:
        >>> old, mu, pi = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[-4.0]])
        >>> policies = dict(old_log_prob=old, rollout_log_prob=mu, log_prob=pi)
        >>> [proximal_log_prob(source, None, **policies).item() for source in ("recompute", "bypass", "reuse")]
        [-1.0, -2.0, -4.0]
        >>> proximal_log_prob("loglinear", 0.5, **policies).item()  # halfway between mu and pi
        -3.0
    """
    match proximal:
        case "recompute":
            return old_log_prob
        case "bypass":
            return rollout_log_prob
        case "reuse":
            return log_prob.detach()
        case "loglinear":
            assert alpha is not None, "validated with the correction"
            dtype = torch.promote_types(torch.promote_types(rollout_log_prob.dtype, log_prob.dtype), torch.float32)
            return torch.lerp(rollout_log_prob.to(dtype), log_prob.detach().to(dtype), alpha)
