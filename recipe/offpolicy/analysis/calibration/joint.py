"""What a whole correction keeps of a recording, by the stages of training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ...correction import CorrectionSpec
from ...recording import Step
from ..whatif.blocks import blocks
from ..whatif.replay import constants_of, decide
from .scores import recorded_spec


@dataclass(frozen=True)
class Joint:
    """All parts of a correction together.

    Attributes:
        tokens: share of response tokens kept.
        rows: share of rows with a token kept.
        ess: (sum w)^2 / (n sum w^2) of weight times keep over valid tokens.
    """

    tokens: float
    rows: float
    ess: float


def joint(steps: Iterable[Step], spec: CorrectionSpec) -> Joint:
    """Replay ``spec`` over ``steps``; shares of nothing are NaN."""
    tokens = kept = rows = kept_rows = valid = 0
    total = square = 0.0
    for step in steps:
        recorded = recorded_spec(step)
        constants = constants_of(spec, recorded, step.rows)
        for block in blocks(step.rows):
            decided = decide(spec, recorded, block, constants)
            weight = decided.weight.double() * decided.keep
            tokens += int(block.mask.sum())
            kept += int(decided.keep.sum())
            rows += int(block.mask.any(-1).sum())
            kept_rows += int(decided.keep.any(-1).sum())
            valid += int(decided.valid.sum())
            total += float(weight.sum())
            square += float(weight.square().sum())
    return Joint(
        tokens=kept / tokens if tokens else math.nan,
        rows=kept_rows / rows if rows else math.nan,
        ess=total**2 / (valid * square) if square else math.nan,
    )
