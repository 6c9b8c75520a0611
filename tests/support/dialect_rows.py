"""Weight times keep under a correction in another framework's keys."""

from __future__ import annotations

import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage


def coefficients(spec: CorrectionSpec, *, old: Tensor, mu: Tensor, mask: Tensor, pi: Tensor | None = None) -> Tensor:
    """weight x keep of each token, through both stages."""
    stage = rollout_stage(spec, old_log_prob=old, rollout_log_prob=mu, response_mask=mask)
    step = step_stage(spec, stage, log_prob=old if pi is None else pi, advantages=torch.ones(old.shape))
    return step.weight * step.keep
