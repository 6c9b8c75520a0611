"""Corrections and random batches that the tests of statistics share."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from recipe.offpolicy.correction import (
    BatchConstants,
    CorrectionSpec,
    RolloutStage,
    StepStage,
    rollout_stage,
    step_stage,
)
from recipe.offpolicy.correction.stages import compute_shadow_statistics
from tests.support.corrections import GSM, TIS, band, opsm, spec

NAN = math.nan
REJECT = TIS | {"kind": "reject", "lower": 0.7, "upper": 1.4}
STACK = dict(gsm=GSM, opsm=opsm(0.05), outlier=band(0.5, 2.0, aggregate="any"), tokens=band(0.8, 1.3, level="token"))
CORRECTIONS: dict[str, CorrectionSpec] = {
    "none": spec(),
    "token": spec(TIS | {"upper": 1.1}, **STACK),
    "reject": spec(REJECT | {"level": "turn"}, **STACK),
    "full": spec(TIS | {"level": "sequence", "ratio": "full", "kind": "clip", "lower": 0.9, "upper": 1.2}),
    "geometric": spec(TIS | {"level": "version", "aggregate": "geometric", "upper": 1.05}, opsm=opsm(0.02, "ppo")),
    "current": spec(drift=band(0.9, 1.1, ratio="ppo", level="token"), rows=opsm(0.02, "ppo")),
    "penalty": CorrectionSpec.from_mapping({"penalty": {"ratio": "ppo", "coefficient": 0.1}}),
    "signs": CorrectionSpec.from_mapping({"weights": {
        "negative": REJECT | {"level": "sequence", "ratio": "full", "when": "negative"},
        "positive": TIS | {"when": "positive"}}}),
    "normalized": spec(REJECT | {"normalize": True}, m2po=dict(
        ratio="rollout", level="token", aggregate="second_moment", budget=0.02, when="any")),
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Rows of tensors; a slice of rows is a micro-batch."""

    mu: Tensor
    old: Tensor
    pi: Tensor
    mask: Tensor
    advantages: Tensor
    segments: Tensor
    versions: Tensor
    staleness: Tensor

    def __getitem__(self, rows: Any) -> Batch:
        return Batch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def log_probs(self) -> dict[str, Any]:
        """The per-token tensors of the rollout stage."""
        return dict(old_log_prob=self.old, rollout_log_prob=self.mu, response_mask=self.mask)

    def unit_ids(self) -> dict[str, Any]:
        return dict(segment_ids=self.segments, versions=self.versions)


def random_batch(seed: int, rows: int = 12, width: int = 90, dtype: torch.dtype = torch.float32) -> Batch:
    """Rows of 0 to ``width`` tokens, with gaps, noise of any size, tokens without mu, and a row with only
    such tokens.
    """
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    noise = 10 ** (-3 * uniform(rows, 1))
    mu = -3 * uniform(rows, width)
    old = mu + noise * (uniform(rows, width) - 0.5)
    pi = old + noise * (uniform(rows, width) - 0.5)
    segments = torch.arange(width).div(1 + uniform(rows, 1) * width, rounding_mode="floor").long().expand(rows, width)
    mask = (torch.arange(width) < (width + 1) * uniform(rows, 1)) & (uniform(rows, width) < 0.9)
    mask[: rows // 12] = False
    mu[uniform(rows, width) < 0.01] = NAN
    mu[rows // 12] = NAN
    return Batch(
        mu=mu.to(dtype),
        old=old.to(dtype),
        pi=pi.to(dtype),
        mask=mask,
        advantages=((uniform(rows, 1) * 3).floor() - 1).expand(rows, width),
        segments=segments + 5,
        versions=(3 * uniform(rows, width)).long(),
        staleness=(5 * uniform(rows)).long(),
    )


def stages(
    correction: CorrectionSpec, batch: Batch, constants: BatchConstants | None = None, **options: Any
) -> tuple[RolloutStage, StepStage]:
    stage = rollout_stage(
        correction,
        **batch.log_probs(),
        **batch.unit_ids() | dict(staleness=batch.staleness, constants=constants) | options,
    )
    return stage, step_stage(correction, stage, log_prob=batch.pi, advantages=batch.advantages)


def shadow(shadows: dict[str, CorrectionSpec], batch: Batch) -> Any:
    stage, _ = stages(CorrectionSpec(), batch)
    return compute_shadow_statistics(shadows, stage, log_prob=batch.pi, advantages=batch.advantages)
