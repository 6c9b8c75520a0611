"""Shares that a whole correction keeps of a recording, by a replay of its stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ...correction import CorrectionSpec
from ...recording import Step
from ..jobs import ALONE, Jobs, map_steps
from ..whatif.blocks import iterate_blocks
from ..whatif.replay import Decision, compute_constants, decide
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


def compute_joint_shares(
    steps: Iterable[Step], specs: Sequence[CorrectionSpec], jobs: Jobs = ALONE
) -> list[JointShares]:
    """Replay each of ``specs`` over ``steps`` and compute what it keeps; shares of nothing are NaN.

    Args:
        steps: a recording, or steps in memory.
        jobs: who replays the steps of a recording.
    """
    found = np.zeros((len(specs), 7))
    whole = any(spec.needs_constants for spec in specs)
    for sums in map_steps(partial(_sum_step, specs), steps, jobs, "replaying", in_pieces=not whole):
        found += sums
    return [_build_shares(*sums) for sums in found.tolist()]


def _build_shares(
    tokens: float, kept: float, rows: float, kept_rows: float, valid: float, total: float, square: float
) -> JointShares:
    return JointShares(
        tokens=kept / tokens if tokens else math.nan,
        rows=kept_rows / rows if rows else math.nan,
        ess=total**2 / (valid * square) if square else math.nan,
    )


@torch.no_grad()
def _sum_step(specs: Sequence[CorrectionSpec], steps: Iterable[Step]) -> NDArray[np.float64]:
    """Sum what each spec decides on one step: (specs, 7), the arguments of ``_build_shares``."""
    found = np.zeros((len(specs), 7))
    for step in steps:
        recorded = read_recorded_spec(step)
        constants = [compute_constants(spec, recorded, step.rows) for spec in specs]
        for block in iterate_blocks(step.rows):
            shared = (int(block.mask.sum()), int(block.mask.any(-1).sum()))
            for sums, spec, of_batch in zip(found, specs, constants, strict=True):
                sums += _sum_decision(*shared, decide(spec, recorded, block, of_batch))
    return found


def _sum_decision(tokens: int, rows: int, decided: Decision) -> NDArray[np.float64]:
    # Rejected tokens count as weight 0, as in the loss.
    weight = decided.weight.double() * decided.keep
    kept, valid = decided.keep, int(decided.valid.sum())
    total, square = float(weight.sum()), float(weight.square().sum())
    return np.array([tokens, int(kept.sum()), rows, int(kept.any(-1).sum()), valid, total, square])
