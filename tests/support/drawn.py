"""Corrections and batches for hypothesis.

Log-probs are multiples of 1/64 above -4, so their differences and sums are exact in every dtype, and results can be
compared bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from hypothesis import assume, settings
from hypothesis import strategies as draw
from torch import Tensor

from recipe.offpolicy.correction import (
    BatchConstants,
    CorrectionSpec,
    StepStage,
    batch_constants,
    rollout_stage,
    step_stage,
)
from recipe.offpolicy.correction.masks import AGGREGATES as TABLE
from tests.support.corrections import tensor
from tests.support.examples import at_most
from tests.support.reference import IN_FORCE, Batch

examples = settings(max_examples=at_most(60), derandomize=True, database=None)


@dataclass(frozen=True)
class Rows:
    """A batch; every tensor is (B, T)."""

    mu: Tensor
    old: Tensor
    pi: Tensor
    mask: Tensor
    advantages: Tensor
    turns: Tensor
    versions: Tensor

    def __getitem__(self, rows: Any) -> Rows:
        return Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, dtype: torch.dtype) -> Rows:
        return replace(self, mu=self.mu.to(dtype), old=self.old.to(dtype), pi=self.pi.to(dtype))

    @property
    def ages(self) -> Tensor:
        return (IN_FORCE - self.versions).clamp(min=0)

    @property
    def lists(self) -> Batch:
        return Batch(*(getattr(self, field.name).tolist() for field in fields(self)))


def decide(
    correction: CorrectionSpec,
    rows: Rows,
    constants: BatchConstants | None = None,
    measure: Literal["all", "nothing"] = "all",
) -> StepStage:
    """Both stages."""
    stage = rollout_stage(
        correction,
        old_log_prob=rows.old,
        rollout_log_prob=rows.mu,
        response_mask=rows.mask,
        segment_ids=rows.turns,
        versions=rows.versions,
        staleness=rows.ages,
        constants=constants,
        measure=measure,
    )
    return step_stage(correction, stage, log_prob=rows.pi, advantages=rows.advantages)


def constants_of(correction: CorrectionSpec, rows: Rows) -> BatchConstants:
    return batch_constants(
        correction,
        old_log_prob=rows.old,
        rollout_log_prob=rows.mu,
        response_mask=rows.mask,
        segment_ids=rows.turns,
        versions=rows.versions,
        staleness=rows.ages,
    )


@draw.composite
def batches(draw_one: Any, min_rows: int = 0) -> Rows:
    shape = (draw_one(draw.integers(min_rows, 4)), draw_one(draw.integers(1, 6)))
    size = shape[0] * shape[1]

    def numbers(low: int, high: int) -> Tensor:
        drawn = draw_one(draw.lists(draw.integers(low, high), min_size=size, max_size=size))
        return tensor(drawn).reshape(shape)

    # Small steps between the policies as well as large ones, so that every band has rows on both sides.
    width = draw_one(draw.sampled_from([1, 8, 60]))
    mu = numbers(-190, -65)
    old = (mu + numbers(-width, width)).clamp(-255, 0)
    pi = (old + numbers(-width, width)).clamp(-255, 0)
    return Rows(
        mu / 64,
        old / 64,
        pi / 64,
        mask=numbers(-1, 1) >= 0,
        advantages=numbers(-2, 2),
        turns=numbers(0, 2).long(),
        versions=numbers(0, 1).long(),
    )


Bounds = tuple[float | None, ...]
LEVELS = ("token", "sequence", "turn", "version", "prefix")
RATIOS = ("rollout", "full", "ppo")
AGGREGATES = tuple(name for name, entry in TABLE.items() if entry.reduce not in ("batch", "oldest"))
"""Aggregates over the ratios of one unit; second_moment and staleness have other bounds."""


# Bands that hold the value of equal policies, so that agreement is a no-op: 1 for ratios, 0 for differences.
LOWER: Bounds = (None, 0.5, 0.9, 0.99, 1.0)
UPPER: Bounds = (None, 1.0, 1.01, 1.1, 2.0)
BELOW: Bounds = (None, -0.5, -0.05, -0.003, 0.0)
ABOVE: Bounds = (None, 0.0, 0.0003, 0.05, 0.5)


FACTORS = (None, [1.0], [1.0, 2.0], [0.5, 1.0, 1.5])
"""Of ``by_staleness``."""


@draw.composite
def weights(draw_one: Any, factors: tuple[Any, ...] = (None,)) -> dict[str, Any] | None:
    level = draw_one(draw.sampled_from([*LEVELS, None]))
    if level is None:
        return None
    lower, upper = draw_one(draw.sampled_from(LOWER)), draw_one(draw.sampled_from(UPPER))
    kinds = ["truncate"] if lower is None or upper is None else ["clip"]
    kinds += ["reject"] if lower is not None or upper is not None else []
    ratio = draw_one(draw.sampled_from(["rollout", "full"]))
    bound, by_prefix = lower is not None or upper is not None, level == "prefix"
    return dict(
        level=level,
        kind=draw_one(draw.sampled_from(kinds)),
        lower=lower,
        upper=upper,
        aggregate=draw_one(draw.sampled_from(["product", "geometric", *(["minimum"] if by_prefix else [])])),
        ratio=ratio,
        normalize=ratio == "rollout" and draw_one(draw.booleans()),
        by_staleness=draw_one(draw.sampled_from(factors)) if bound and not by_prefix else None,
        by_position=draw_one(draw.sampled_from([None, 0.5, -0.5])) if bound and by_prefix else None,
    )


@draw.composite
def masks(
    draw_one: Any, aggregates: tuple[str, ...] = (*AGGREGATES, "second_moment"), factors: tuple[Any, ...] = (None,)
) -> dict[str, Any]:
    aggregate = draw_one(draw.sampled_from(aggregates))
    if aggregate == "second_moment":
        budget = draw_one(draw.sampled_from([0.0001, 0.01, 0.2]))
        return dict(ratio="rollout", level="token", aggregate=aggregate, budget=budget, when="any")
    when = draw_one(
        draw.sampled_from(["any", "negative", "positive", *(["outward"] if aggregate != "staleness" else [])])
    )
    mapping = dict(
        ratio=draw_one(draw.sampled_from(RATIOS)),
        level=draw_one(draw.sampled_from(LEVELS)),
        aggregate=aggregate,
        when=when,
        sign="row" if when == "any" else draw_one(draw.sampled_from(["row", "token"])),
    )
    if aggregate == "staleness":
        del mapping["ratio"]
        return mapping | {"upper": draw_one(draw.integers(0, 3))}
    entry = TABLE[aggregate]
    if entry.on_ratio:
        by_prefix = mapping["level"] == "prefix"
        mapping["by_staleness"] = None if by_prefix else draw_one(draw.sampled_from(factors))
        mapping["by_position"] = draw_one(draw.sampled_from([None, 0.5, -0.5])) if by_prefix else None
    if entry.of_log_ratios and draw_one(draw.booleans()):
        return mapping | {"delta": draw_one(draw.sampled_from([0.0, 1 / 64, 0.125, 0.5]))}
    lowers, uppers = (LOWER, UPPER) if entry.on_ratio else (BELOW, ABOVE)
    if entry.one_sided:  # it is agreement or above
        lowers, uppers = ((None, 1.0), UPPER[2:]) if entry.on_ratio else ((None, 0.0), ABOVE[1:])
    lower, upper = draw_one(draw.sampled_from(lowers)), draw_one(draw.sampled_from(uppers))
    assume(lower is not None or upper is not None)
    if mapping["level"] == "token" and entry.of_log_ratios and when == "any":
        assume(lower is not None and upper is not None)
    return mapping | {"lower": lower, "upper": upper}


@draw.composite
def weights_by_sign(draw_one: Any, factors: tuple[Any, ...] = (None,)) -> dict[str, Any]:
    """Draw a weight for one sign or for each sign, of rows or of tokens, or none."""
    drawn = [draw_one(weights(factors)) for _ in range(2)]
    sign = draw_one(draw.sampled_from(["row", "token"]))
    return {
        name: weight | {"normalize": False, "when": when, "sign": sign}
        for name, when, weight in zip("ab", ("negative", "positive"), drawn, strict=True)
        if weight is not None
    }


@draw.composite
def corrections(draw_one: Any, by_age: bool = False) -> CorrectionSpec:
    """Draw any weight or weights by sign, up to three masks, and the default proximal policy; parts that depend on age
    only if asked for.
    """
    drawn = masks((*AGGREGATES, "second_moment", "staleness"), FACTORS) if by_age else masks()
    named = dict(zip("abc", draw_one(draw.lists(drawn, max_size=3)), strict=False))
    factors = FACTORS if by_age else (None,)
    weight = draw_one(weights(factors))
    by_sign = draw_one(weights_by_sign(factors)) if weight is None else {}
    return CorrectionSpec.from_mapping({"weight": weight, "weights": by_sign, "masks": named})


@draw.composite
def skyrl_corrections(draw_one: Any) -> CorrectionSpec:
    """Draw corrections that SkyRL can express: outlier, token and sequence masks, and truncation by token or
    sequence.
    """
    masks: dict[str, Any] = {}
    on_rollout = dict(ratio="rollout", when="any")
    names = draw_one(draw.permutations("abcd"))
    low, high = draw.sampled_from([0.5, 0.9, 0.98]), draw.sampled_from([1.02, 1.1, 2.0])
    for name, level, aggregate in zip(
        names, ("sequence", "token", "token", "sequence"), ("any", "product", "any", "geometric"), strict=True
    ):
        if draw_one(draw.booleans()):
            bounds = {"lower": draw_one(low), "upper": draw_one(high)}
            masks[name] = on_rollout | bounds | {"level": level, "aggregate": aggregate}
    level = draw_one(draw.sampled_from(["token", "sequence", None]))
    weight = level and dict(level=level, kind="truncate", lower=None, upper=draw_one(draw.sampled_from([1.1, 5.0])))
    return CorrectionSpec.from_mapping({"weight": weight, "masks": masks, "skyrl_compat": True})
