"""Short ways to write a correction, and to run both of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, RolloutStage, Statistic, StepStage, rollout_stage, step_stage
from recipe.offpolicy.correction.statistics import defer_statistics, fetch

GSM: dict[str, Any] = dict(ratio="rollout", level="sequence", aggregate="geometric", lower=0.99, upper=1.01, when="any")
TIS: dict[str, Any] = dict(level="token", kind="truncate", lower=None, upper=2.0)
M2PO: dict[str, Any] = dict(ratio="rollout", level="token", aggregate="second_moment", budget=0.04, when="any")


def band(lower: float | None, upper: float | None, **changes: Any) -> dict[str, Any]:
    """A mask with two bounds; geometric on pi_old / mu for rows, unless ``changes`` say otherwise."""
    return GSM | {"lower": lower, "upper": upper} | changes


def opsm(delta: float, ratio: str = "full", **changes: Any) -> dict[str, Any]:
    """Off-policy sequence masking, DeepSeek-V3.2 eq. 9."""
    values = dict(ratio=ratio, level="sequence", aggregate="geometric", delta=delta, when="negative")
    return values | changes


def spec(weight: Mapping[str, Any] | None = None, **masks: Mapping[str, Any]) -> CorrectionSpec:
    """Build a correction from the mappings of its weight and of its masks."""
    return CorrectionSpec.from_mapping({"weight": weight, "masks": masks})


def tensor(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype)


def on_host(statistics: Mapping[str, Statistic]) -> dict[str, Statistic]:
    """Return the statistics as floats, as they leave a worker."""
    return dict(fetch([defer_statistics(statistics)])[0])


def first_stage(
    correction: CorrectionSpec,
    *,
    mu: Any,
    old: Any,
    mask: Any = None,
    turns: Any = None,
    versions: Any = None,
    dtype: Any = torch.float32,
) -> RolloutStage:
    """Run the rollout stage on rows given as nested lists; by default, the mask contains all tokens."""
    mu, old = tensor(mu, dtype), tensor(old, dtype)
    return rollout_stage(
        correction,
        old_log_prob=old,
        rollout_log_prob=mu,
        response_mask=torch.ones_like(old, dtype=torch.bool) if mask is None else torch.as_tensor(mask),
        segment_ids=None if turns is None else torch.as_tensor(turns),
        versions=None if versions is None else torch.as_tensor(versions),
    )


def run(
    correction: CorrectionSpec,
    *,
    mu: Any,
    old: Any,
    pi: Any = None,
    advantages: Any = 1.0,
    dtype: Any = torch.float32,
    **rows: Any,
) -> StepStage:
    """Run both stages on rows given as nested lists, see ``first_stage``; by default, pi is pi_old.

    ``advantages`` is a number for all rows, a list with one number per row, or (B, T).
    """
    stage = first_stage(correction, mu=mu, old=old, dtype=dtype, **rows)
    signs = tensor(advantages)
    if signs.dim() == 1:
        signs = signs[:, None]
    pi = stage.columns["old_log_prob"] if pi is None else tensor(pi, dtype)
    return step_stage(correction, stage, log_prob=pi, advantages=signs.expand(stage.valid.shape))


def values(step: StepStage) -> dict[str, float]:
    """Return the statistics as the logger receives them."""
    return {name: statistic.value() for name, statistic in step.statistics.items()}


def kept(step: Any) -> list[bool]:
    """Return whether each row is kept; all tokens of a row must agree."""
    assert (step.keep == step.keep[:, :1]).all()
    return step.keep[:, 0].tolist()
