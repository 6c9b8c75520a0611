"""Rows that are packed end to end, and the same rows padded."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, RolloutStage, StepStage, rollout_stage, step_stage, turns
from tests.support.drawn import Rows

NAMES = ("mu", "old", "pi", "mask", "advantages", "turns", "versions")


def packed(rows: Tensor, lengths: list[int]) -> Tensor:
    """Return the first tokens of each padded row, end to end."""
    values = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)]) if lengths else rows.flatten()
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *lengths]).cumsum(0))


def pack(rows: Rows, lengths: list[int]) -> Rows:
    return Rows(**{name: packed(getattr(rows, name), lengths) for name in NAMES})


def both_stages(correction: CorrectionSpec, rows: Rows, **options: Any) -> tuple[RolloutStage, StepStage]:
    stage = rollout_stage(
        correction,
        old_log_prob=rows.old,
        rollout_log_prob=rows.mu,
        response_mask=rows.mask,
        segment_ids=rows.turns,
        versions=rows.versions,
        **options,
    )
    return stage, step_stage(correction, stage, log_prob=rows.pi, advantages=rows.advantages)


def noisy(seed: int = 0, rows: int = 9, width: int = 40) -> tuple[Rows, list[int]]:
    """Full float64 noise; empty rows at the start, in the middle and at the end; NaN in mu, and a row with only NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: float) -> Tensor:
        return size * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[[0, 4, rows - 1]] = 0
    mask = (torch.arange(width) < lengths[:, None]) & (torch.rand(rows, width, generator=generator) < 0.8)
    mu = -normal(1.0).abs()
    old = mu + normal(0.05)
    mu[3], mu[1:, 5] = math.nan, math.nan
    versions = torch.randint(3, 6, (rows, width), generator=generator)
    made = Rows(mu, old, old + normal(0.05), mask, normal(1.0), turns(mask), versions)
    return made, lengths.tolist()
