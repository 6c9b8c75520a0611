"""Rows on which another framework and a correction in its keys are compared."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage

Row = tuple[list[float], list[bool]]  # log-ratios of a row's tokens, and which of them are valid


def coefficients(
    spec: CorrectionSpec, *, old: Tensor, mu: Tensor, mask: Tensor, pi: Tensor | None = None, advantages: Any = 1.0
) -> Tensor:
    """weight x keep of each token, through both stages."""
    stage = rollout_stage(spec, old_log_prob=old, rollout_log_prob=mu, response_mask=mask)
    signs = torch.as_tensor(advantages, dtype=torch.float32)
    signs = signs[:, None] if signs.dim() == 1 else signs
    step = step_stage(spec, stage, log_prob=old if pi is None else pi, advantages=signs.expand(old.shape))
    return step.weight * step.keep


def rectangle(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Log-ratios and mask, padded to one width."""
    width = max(len(values) for values, _ in rows)
    log_ratio = torch.zeros(len(rows), width)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (values, valid) in enumerate(rows):
        log_ratio[i, : len(values)] = torch.tensor(values)
        mask[i, : len(valid)] = torch.tensor(valid)
    return log_ratio, mask


# Sixteenths of a nat are exact in float32, so that sums are exact and no bound below is hit by rounding.
small = st.integers(-40, 40).map(lambda n: n / 16)
log_ratios = st.one_of(small, small.map(lambda d: d / 64), st.sampled_from([-12.0, -10.0, 5.0, 6.0]))


@st.composite
def row(draw: st.DrawFn) -> Row:
    length = draw(st.integers(1, 6))
    lists = st.lists(log_ratios, min_size=length, max_size=length)
    return draw(lists), draw(st.lists(st.booleans(), min_size=length, max_size=length))


rows = st.lists(row(), min_size=1, max_size=4)
