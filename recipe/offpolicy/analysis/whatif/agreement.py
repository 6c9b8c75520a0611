"""Agreement of replayed corrections with each other, and of the recorded correction's replay with the record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .replay import Block, Decision

Matrix = NDArray[np.float64]


class AgreementCounter:
    """Counts, over blocks, of the tokens and rows that both corrections of a pair reject, for all pairs of S."""

    def __init__(self, corrections: int) -> None:
        self.tokens, self.rows = (np.zeros((corrections, corrections)) for _ in range(2))
        self.gram = np.zeros((corrections, corrections))

    def add(self, places: list[int], keep: list[Tensor], weighed: list[Tensor], counted: Tensor) -> None:
        """Add one block.

        Args:
            places: indices of these corrections among the S.
            keep: (B, W) bool for each correction.
            weighed: (B, W) float64 for each correction: its gradient weights f A.
            counted: (B, W) bool, tokens that are compared. A row is rejected if all of these tokens are rejected.
        """
        if not places:
            return
        rejected = torch.stack([counted & ~one for one in keep])
        whole = (rejected.sum(-1) == counted.sum(-1)) & counted.any(-1)
        # Float32 holds the counts of a block exactly.
        flat, by_row = rejected.flatten(1).float(), whole.float()
        at = np.ix_(places, places)
        self.tokens[at] += (flat @ flat.T).numpy()
        self.rows[at] += (by_row @ by_row.T).numpy()
        gradient = torch.stack(weighed).flatten(1)
        self.gram[at] += (gradient @ gradient.T).numpy()

    def add_counts(self, other: AgreementCounter) -> None:
        """Add the counts of other blocks, of the same corrections."""
        self.tokens += other.tokens
        self.rows += other.rows
        self.gram += other.gram

    def compute_agreement(self, places: list[int]) -> Agreement:
        """Compute the agreement of the corrections that were in every block."""
        at = np.ix_(places, places)
        tokens, rows, gram = self.tokens[at], self.rows[at], self.gram[at]
        # The Gram matrix of the gradient weights gives all cosines at once.
        norm = np.sqrt(np.diag(gram))
        scale = norm[:, None] * norm[None, :]
        return Agreement(
            jaccard_tokens=_jaccard(tokens),
            jaccard_rows=_jaccard(rows),
            cosine=np.divide(gram, scale, out=np.full_like(scale, math.nan), where=scale > 0),
        )


@dataclass(frozen=True)
class Agreement:
    """Agreement of each pair of S corrections; (S, S) each, symmetric, NaN if undefined.

    Attributes:
        jaccard_tokens, jaccard_rows: share of the tokens, or rows, rejected by at least one that are rejected by both;
            undefined if neither rejects anything.
        cosine: cosine of the gradient weights f A.
    """

    jaccard_tokens: Matrix
    jaccard_rows: Matrix
    cosine: Matrix


def _jaccard(both: Matrix) -> Matrix:
    own = np.diag(both)
    either = own[:, None] + own[None, :] - both
    return np.divide(both, either, out=np.full_like(both, math.nan), where=either > 0)


TOLERANCE = 1e-5
"""Relative tolerance of a weight. Weights are float32, exponentiated on the run's own device."""


@dataclass(frozen=True)
class Fidelity:
    """Comparison of the recorded correction's replay with the record.

    Attributes:
        tokens: number of compared response tokens. Their mu and pi_old are finite; a correction does not act on other
            tokens.
        weights: number of these tokens whose weight differs by more than ``TOLERANCE``.
        rejections: number of these tokens that were not rejected by the same parts as recorded; decisions must match
            exactly.
        weight_error: largest relative difference of a weight.
    """

    tokens: int = 0
    weights: int = 0
    rejections: int = 0
    weight_error: float = 0.0

    @property
    def agrees(self) -> bool:
        return not (self.weights or self.rejections)

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(
            self.tokens + other.tokens,
            self.weights + other.weights,
            self.rejections + other.rejections,
            max(self.weight_error, other.weight_error),
        )


def compare_with_record(by: Decision, of: Block, reasons: Sequence[str]) -> Fidelity:
    """Compare one block.

    Args:
        by: the recorded correction's decision in the replay.
        reasons: names of the bits of ``rejected_by``.
    """
    # Rebuild the recorded bit field, with one bit per reason.
    replayed = torch.zeros_like(of.rejected_by)
    for bit, reason in enumerate(reasons):
        if (drop := by.rejected.get(reason)) is not None:
            replayed |= (drop & by.valid).int() << bit
    other = of.mask & (replayed != of.rejected_by)
    # A part that the record does not name rejects here as well.
    other |= of.mask & by.valid & ((of.rejected_by == 0) != by.keep)
    # Weights have no effect outside the valid tokens.
    error = ((by.weight - of.weight).abs() / of.weight.abs().clamp(min=1e-30)).nan_to_num(torch.inf)
    error = torch.where(by.valid & (by.weight != of.weight), error, 0.0)
    beyond = error > TOLERANCE
    return Fidelity(
        tokens=int((of.mask & by.valid).sum()),
        weights=int(beyond.sum()),
        rejections=int(other.sum()),
        weight_error=float(error.max()) if error.numel() else 0.0,
    )
