"""Source of pi_old, the proximal policy."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Proximal = Literal["recompute", "bypass", "reuse", "loglinear", "same_engine"]

Alpha = float | Literal["by_age"]
"""Weight of log pi in ``loglinear``: one number for all tokens, or a weight that depends on each token's age."""
BY_AGE: Literal["by_age"] = "by_age"
WITHOUT_FORWARD = ("bypass", "reuse", "loglinear")
"""Sources of pi_old that need no forward pass."""
OF_THE_TRAINER = ("recompute", "reuse")
"""Sources for which pi_old is the policy of the trainer's weights at the start of the step."""
TOLERANCE = 1e-6
"""Largest |log mu - log pi_old| allowed for a token with ``same_engine``, in nats; the resolution of float32 at a
log-prob of -8 is about 1e-6."""
MU_ITSELF = ("bypass", "same_engine")
"""Sources for which pi_old is mu, so pi_old / mu is 1."""


def proximal_log_prob(
    proximal: Proximal,
    alpha: Alpha | None,
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    ages: Tensor | None = None,
) -> Tensor:
    """Compute the log pi_old that corrections and the base loss use.

    * ``recompute``: the trainer computed it at the start of the step. There are three policies, as in decoupled PPO.
    * ``bypass``: mu itself, so PPO's ratio is pi / mu. There are two policies.
    * ``reuse``: the current policy, detached. It is exact if there is only one gradient step per batch, because pi_old
      then equals pi.
    * ``loglinear``: (1 - alpha) log mu + alpha log pi, detached: an interpolation between the sampling and the current
      policy. It is an approximation that costs no forward pass. With ``alpha=by_age``, alpha is (a - 1) / a for a token
      of age a, and 0 at age 0, as in AReaL's ``compute_prox_logp_approximations``. That function uses the newest
      weights, a versions after the token's, as pi, and the weights one version earlier as pi_old. AReaL's documentation
      describes pi_old as one step behind the trained policy; under that definition, alpha would be a / (a + 1).
    * ``same_engine``: mu itself, for an engine whose log-probs equal the trainer's. The trainer computes pi_old in its
      first step and stops unless mu and pi_old agree, see ``proof.rollout_log_probs``.

    Args:
        old_log_prob: (B, T), read only for ``recompute``.
        rollout_log_prob: (B, T), log mu.
        log_prob: (B, T), log pi, detached here.
        ages: (B,) or (B, T), the number of weight versions since each row, or token, was sampled; read only for
            ``by_age``.

    Raises:
        ValueError: ``by_age`` without ages.

    Returns:
        (B, T), in the dtype of the log-probs from which it is computed; float32 or wider for ``loglinear``.

    Example:
        >>> old, mu, pi = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[-4.0]])
        >>> policies = dict(old_log_prob=old, rollout_log_prob=mu, log_prob=pi)
        >>> [proximal_log_prob(source, None, **policies).item() for source in ("recompute", "bypass", "reuse")]
        [-1.0, -2.0, -4.0]
        >>> proximal_log_prob("loglinear", 0.5, **policies).item()  # halfway between mu and pi
        -3.0
        >>> proximal_log_prob("loglinear", "by_age", **policies, ages=torch.tensor([2])).item()  # (2 - 1) / 2
        -3.0
    """
    match proximal:
        case "recompute":
            return old_log_prob
        case "bypass" | "same_engine":
            return rollout_log_prob
        case "reuse":
            return log_prob.detach()
        case "loglinear":
            assert alpha is not None, "validated with the correction"
            dtype = torch.promote_types(torch.promote_types(rollout_log_prob.dtype, log_prob.dtype), torch.float32)
            share: Tensor | float
            if alpha == BY_AGE:
                share = _share_by_age(ages, rollout_log_prob.device, dtype)
            else:
                share = float(alpha)
            return torch.lerp(rollout_log_prob.to(dtype), log_prob.detach().to(dtype), share)


def _share_by_age(ages: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    if ages is None:
        raise ValueError(
            "correction.alpha=by_age needs the age of the weights, but the batch does not contain the versions of "
            "the weights that sampled it. Set correction.alpha=0.5 for example."
        )
    age = (ages if ages.dim() == 2 else ages[:, None]).to(device, dtype)
    return (age - 1).clamp(min=0) / age.clamp(min=1)
