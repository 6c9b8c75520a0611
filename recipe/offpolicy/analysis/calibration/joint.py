"""Shares that a whole correction keeps of a recording, by a replay of its stages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ...correction import CorrectionSpec
from ...recording import Step
from ..whatif.blocks import iterate_blocks
from ..whatif.replay import compute_constants, decide
from .scores import read_recorded_spec


@dataclass(frozen=True)
class JointShares:
    """Shares kept by all parts of a correction together.

    Attributes:
        tokens: share of response tokens kept.
        rows: share of rows with a token kept.
        ess: (sum w)^2 / (n sum w^2) of weight times keep over valid tokens.
    """

    tokens: float
    rows: float
    ess: float


def compute_joint_shares(steps: Iterable[Step], spec: CorrectionSpec) -> JointShares:
    """Replay ``spec`` over ``steps`` and compute what it keeps; shares of nothing are NaN."""
    tokens = kept = rows = kept_rows = valid = 0
    total = square = 0.0
    for step in steps:
        recorded = read_recorded_spec(step)
        constants = compute_constants(spec, recorded, step.rows)
        for block in iterate_blocks(step.rows):
            decided = decide(spec, recorded, block, constants)
            # Rejected tokens count as weight 0, as in the loss.
            weight = decided.weight.double() * decided.keep
            tokens += int(block.mask.sum())
            kept += int(decided.keep.sum())
            rows += int(block.mask.any(-1).sum())
            kept_rows += int(decided.keep.any(-1).sum())
            valid += int(decided.valid.sum())
            total += float(weight.sum())
            square += float(weight.square().sum())
    return JointShares(
        tokens=kept / tokens if tokens else math.nan,
        rows=kept_rows / rows if rows else math.nan,
        ess=total**2 / (valid * square) if square else math.nan,
    )
