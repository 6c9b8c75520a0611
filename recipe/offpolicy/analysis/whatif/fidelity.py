"""Fidelity of the replay of the recorded correction; if it disagrees, no other replay is credible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Block
from .replay import Decision

TOLERANCE = 1e-5
"""Of a weight, relative. Weights are float32, exponentiated on the run's own device."""


@dataclass(frozen=True)
class Fidelity:
    """Comparison of the recorded correction's replay with the record.

    Attributes:
        tokens: response tokens compared, mu and pi_old finite: on others nothing acts.
        weights: of these, whose weight differs by more than ``TOLERANCE``.
        rejections: of these, rejected by other parts than recorded; decisions are compared to the bit.
        weight_error: greatest relative difference of a weight.
        example: the first that differs, in words; empty where none does.
    """

    tokens: int = 0
    weights: int = 0
    rejections: int = 0
    weight_error: float = 0.0
    example: str = ""

    @property
    def agrees(self) -> bool:
        return not (self.weights or self.rejections)

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(
            self.tokens + other.tokens,
            self.weights + other.weights,
            self.rejections + other.rejections,
            max(self.weight_error, other.weight_error),
            self.example or other.example,
        )


def compare_with_record(by: Decision, of: Block, reasons: Sequence[str], step: int) -> Fidelity:
    """Compare one block of one step.

    Args:
        by: what the recorded correction decided in the replay.
        reasons: names of the bits of ``rejected_by``.
    """
    # Rebuilds the recorded bit field, a bit a reason.
    replayed = torch.zeros_like(of.rejected_by)
    for bit, reason in enumerate(reasons):
        if (drop := by.rejected.get(reason)) is not None:
            replayed |= (drop & by.valid).int() << bit
    other = of.mask & (replayed != of.rejected_by)
    # A part that the record has no name for rejects here as well.
    other |= of.mask & by.valid & ((of.rejected_by == 0) != by.keep)
    # Off the valid tokens weights act on nothing.
    error = ((by.weight - of.weight).abs() / of.weight.abs().clamp(min=1e-30)).nan_to_num(torch.inf)
    error = torch.where(by.valid & (by.weight != of.weight), error, 0.0)
    beyond = error > TOLERANCE
    return Fidelity(
        tokens=int((of.mask & by.valid).sum()),
        weights=int(beyond.sum()),
        rejections=int(other.sum()),
        weight_error=float(error.max()) if error.numel() else 0.0,
        example=_example(other, beyond, replayed, by, of, step),
    )


def _example(other: Tensor, beyond: Tensor, replayed: Tensor, by: Decision, of: Block, step: int) -> str:
    different = other | beyond
    if not bool(different.any()):
        return ""
    row, column = (int(place) for place in different.nonzero()[0])
    what = (
        f"rejected_by {int(of.rejected_by[row, column])}, replayed {int(replayed[row, column])}"
        if bool(other[row, column])
        else f"weight {float(of.weight[row, column]):.7g}, replayed {float(by.weight[row, column]):.7g}"
    )
    return f"step {step}, row {int(of.rows[row])}, token {column}: recorded {what}"
