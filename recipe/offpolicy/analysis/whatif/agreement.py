"""Agreement of corrections on the same tokens: rejections in common and cosine of the gradient weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Matrix = NDArray[np.float64]


class AgreementCounter:
    """Counts, over blocks, of what each pair of S corrections rejects in common."""

    def __init__(self, corrections: int) -> None:
        self.tokens, self.rows = (np.zeros((corrections, corrections)) for _ in range(2))
        self.gram = np.zeros((corrections, corrections))
        self.count = {"tokens": 0.0, "rows": 0.0}

    def add(self, places: list[int], keep: list[Tensor], weighed: list[Tensor], counted: Tensor) -> None:
        """Add one block.

        Args:
            places: which of the S corrections these are.
            keep: of each correction, (B, W) bool.
            weighed: of each correction, (B, W) float64, its gradient weights f A.
            counted: (B, W) bool, tokens that are compared. A row is rejected if all of these are.
        """
        if not places:
            return
        rejected = torch.stack([counted & ~one for one in keep])
        there = counted.any(-1)
        whole = (rejected.sum(-1) == counted.sum(-1)) & there
        # Float32 holds the counts of a block exactly.
        flat, by_row = rejected.flatten(1).float(), whole.float()
        at = np.ix_(places, places)
        self.tokens[at] += (flat @ flat.T).numpy()
        self.rows[at] += (by_row @ by_row.T).numpy()
        self.count["tokens"] += float(counted.sum())
        self.count["rows"] += float(there.sum())
        gradient = torch.stack(weighed).flatten(1)
        self.gram[at] += (gradient @ gradient.T).numpy()

    def add_counts(self, other: AgreementCounter) -> None:
        """Add the counts of other blocks, of the same corrections."""
        self.tokens += other.tokens
        self.rows += other.rows
        self.gram += other.gram
        self.count = {name: count + other.count[name] for name, count in self.count.items()}

    def compute_agreement(self, places: list[int]) -> Agreement:
        """Compute the agreement of those corrections that were in every block."""
        at = np.ix_(places, places)
        tokens, rows, gram = self.tokens[at], self.rows[at], self.gram[at]
        # The Gram matrix of the gradient weights gives all cosines at once.
        norm = np.sqrt(np.diag(gram))
        scale = norm[:, None] * norm[None, :]
        return Agreement(
            jaccard_tokens=_jaccard(tokens),
            jaccard_rows=_jaccard(rows),
            kappa_tokens=_kappa(tokens, self.count["tokens"]),
            kappa_rows=_kappa(rows, self.count["rows"]),
            cosine=np.divide(gram, scale, out=np.full_like(scale, math.nan), where=scale > 0),
        )


@dataclass(frozen=True)
class Agreement:
    """Agreement of each pair of S corrections; (S, S) each, symmetric, NaN where undefined.

    Attributes:
        jaccard_tokens, jaccard_rows: of what either rejects, the share that both reject; undefined where neither
            rejects anything.
        kappa_tokens, kappa_rows: Cohen's kappa of kept and rejected, agreement beyond chance (Cohen 1960): 1 the same,
            0 as unrelated as chance; undefined where chance alone agrees on everything.
        cosine: of the gradient weights f A.
    """

    jaccard_tokens: Matrix
    jaccard_rows: Matrix
    kappa_tokens: Matrix
    kappa_rows: Matrix
    cosine: Matrix


def _jaccard(both: Matrix) -> Matrix:
    own = np.diag(both)
    either = own[:, None] + own[None, :] - both
    return np.divide(both, either, out=np.full_like(both, math.nan), where=either > 0)


def _kappa(both: Matrix, count: float) -> Matrix:
    """Compute (p_o - p_e) / (1 - p_e), p_o the observed share of equal decisions, p_e that of independent ones."""
    if not count:
        return np.full_like(both, math.nan)
    own = np.diag(both) / count
    rejects = both / count
    # Equal decisions: both keep, a share of 1 - a - b + r, or both reject, r.
    observed = 1 - own[:, None] - own[None, :] + 2 * rejects
    chance = own[:, None] * own[None, :] + (1 - own[:, None]) * (1 - own[None, :])
    return np.divide(observed - chance, 1 - chance, out=np.full_like(both, math.nan), where=chance < 1)
