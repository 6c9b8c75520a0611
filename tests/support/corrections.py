"""Short ways to write a correction and to run both of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, StepStage, rollout_stage, step_stage

GSM: dict[str, Any] = dict(ratio="rollout", level="sequence", aggregate="geometric", lower=0.99, upper=1.01, when="any")
TIS: dict[str, Any] = dict(level="token", kind="truncate", lower=None, upper=2.0)


def band(lower: float | None, upper: float | None, **changes: Any) -> dict[str, Any]:
    """A mask with two bounds; geometric on pi_old / mu for any row unless ``changes`` say otherwise."""
    return GSM | {"lower": lower, "upper": upper} | changes


def opsm(delta: float, ratio: str = "full", **changes: Any) -> dict[str, Any]:
    """Off-policy sequence masking, DeepSeek-V3.2 eq. 9."""
    values = dict(ratio=ratio, level="sequence", aggregate="geometric", delta=delta, when="negative")
    return values | changes


def spec(weight: Mapping[str, Any] | None = None, **masks: Mapping[str, Any]) -> CorrectionSpec:
    """A correction from the mapping of its weight and of its masks by name."""
    return CorrectionSpec.from_mapping({"weight": weight, "masks": masks})


def tensor(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype)


def run(
    correction: CorrectionSpec,
    *,
    mu: Any,
    old: Any,
    pi: Any = None,
    mask: Any = None,
    advantages: Any = 1.0,
    dtype: torch.dtype = torch.float32,
) -> StepStage:
    """Both stages on rows given as nested lists; pi defaults to pi_old, the mask to all tokens.

    ``advantages`` is a number for all rows, a list with one number a row, or (B, T).
    """
    mu, old = tensor(mu, dtype), tensor(old, dtype)
    pi = old if pi is None else tensor(pi, dtype)
    mask = torch.ones_like(old, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    signs = tensor(advantages)
    if signs.dim() == 1:
        signs = signs[:, None]
    stage = rollout_stage(correction, old_log_prob=old, rollout_log_prob=mu, response_mask=mask)
    return step_stage(correction, stage, log_prob=pi, advantages=signs.expand(old.shape))


def values(step: StepStage) -> dict[str, float]:
    """The statistics as the logger would get them."""
    return {name: statistic.value() for name, statistic in step.statistics.items()}
