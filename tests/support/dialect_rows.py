"""Weight times keep under a correction in another framework's keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage


def coefficients(
    spec: CorrectionSpec, *, old: Tensor, mu: Tensor, mask: Tensor, pi: Tensor | None = None, advantages: Any = 1.0
) -> Tensor:
    """weight x keep of each token, through both stages."""
    stage = rollout_stage(spec, old_log_prob=old, rollout_log_prob=mu, response_mask=mask)
    signs = torch.as_tensor(advantages, dtype=torch.float32)
    signs = signs[:, None] if signs.dim() == 1 else signs
    step = step_stage(spec, stage, log_prob=old if pi is None else pi, advantages=signs.expand(old.shape))
    return step.weight * step.keep
