"""What one pass over a batch leaves of it: a few numbers a row, from which every metric and decision comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Kind = Literal["raw", "capped", "banded", "k1", "k2", "k3"]
"""A token's weight before its bounds, min(w, upper), or 0 outside both bounds; and k1, k2, k3 of log pi_old / mu."""

Numbers = NDArray[np.float64]
Truths = NDArray[np.bool_]

COLUMNS = ("response", "tokens", "old", "rollout", "log_ratio", "k2", "k3", "chi2", "k2_max", "k3_max")
MEASURES = ("total", "square", "deviation", "squared_deviation", "least", "greatest", "above", "below")


@dataclass(frozen=True)
class Quantity:
    """What is measured of each token, and the bounds that it is held against.

    Attributes:
        lower, upper: inclusive bounds, in nats, compared in float32: of log pi_old / mu for weights, and of k1, k2, k3
            themselves; infinite where open.
        bounds: of the weight itself, for ``capped`` and ``banded``.
    """

    kind: Kind
    lower: float
    upper: float
    bounds: tuple[float, float] = (0.0, 0.0)

    @property
    def is_weight(self) -> bool:
        return self.kind in ("raw", "capped", "banded")

    @property
    def about(self) -> float:
        """A guess of the mean, about which deviations are taken."""
        return 1.0 if self.is_weight else 0.0

    @property
    def clamp(self) -> tuple[float, float]:
        """Bounds that a value is clamped to before its deviation is taken; open for weights."""
        if self.is_weight:
            return -float("inf"), float("inf")
        return self.lower if self.kind == "k1" else 0.0, self.upper


@dataclass(frozen=True)
class Columns:
    """Sums over the valid tokens of each row, (B,) float64 each.

    Attributes:
        response: tokens in the response mask, valid or not.
        tokens: T, valid tokens.
        old, rollout, log_ratio: sums of log pi_old, log mu and their difference.
        k2, k3: sums of k2 and k3.
        chi2: sum of rho^2 - 1.
        k2_max, k3_max: greatest k2 and k3, 0 for no token.
    """

    response: Numbers
    tokens: Numbers
    old: Numbers
    rollout: Numbers
    log_ratio: Numbers
    k2: Numbers
    k3: Numbers
    chi2: Numbers
    k2_max: Numbers
    k3_max: Numbers

    @classmethod
    def of(cls, table: Numbers) -> Columns:
        """From (10, B), in the order of ``COLUMNS``."""
        return cls(*table)

    def where(self, rows: Truths | slice) -> Columns:
        """Of some of the rows."""
        return Columns(*(getattr(self, name)[rows] for name in COLUMNS))


@dataclass(frozen=True)
class Measures:
    """Columns of m quantities v, each one that tokens have or one that all tokens of a row share.

    Attributes:
        of_tokens: (m,) whether shares of what lies outside the bounds count tokens, not rows.
        about: (m,) a guess of the mean, about which deviations are taken.
        table: (8, m, B) float64, in the order of ``MEASURES``: sums of v and v^2 over the row's tokens; sums of
            c - about and its square, c being v clamped to its bounds; extremes of v, without meaning for a row without
            a token; tokens beyond the upper and the lower bound.
    """

    of_tokens: Truths
    about: Numbers
    table: Numbers

    @classmethod
    def by_token(cls, quantities: Sequence[Quantity], table: Numbers) -> Measures:
        about = np.array([quantity.about for quantity in quantities], dtype=np.float64)
        return cls(np.ones(len(quantities), dtype=np.bool_), about, table)

    @property
    def total(self) -> Numbers:
        return self.table[0]

    @property
    def square(self) -> Numbers:
        return self.table[1]

    @property
    def deviation(self) -> Numbers:
        return self.table[2]

    @property
    def squared_deviation(self) -> Numbers:
        return self.table[3]

    @property
    def least(self) -> Numbers:
        return self.table[4]

    @property
    def greatest(self) -> Numbers:
        return self.table[5]

    @property
    def above(self) -> Numbers:
        return self.table[6]

    @property
    def below(self) -> Numbers:
        return self.table[7]

    def pick(self, part: slice | Sequence[int]) -> Measures:
        """Some of the quantities."""
        return Measures(self.of_tokens[part], self.about[part], self.table[:, part])

    def where(self, rows: Truths | slice) -> Measures:
        """Of some of the rows."""
        return Measures(self.of_tokens, self.about, self.table[:, :, rows])

    def beside(self, other: Measures) -> Measures:
        """The quantities of both."""
        return Measures(
            np.concatenate([self.of_tokens, other.of_tokens]),
            np.concatenate([self.about, other.about]),
            np.concatenate([self.table, other.table], axis=1),
        )


def beyond(values: Numbers, lower: Numbers, upper: Numbers) -> tuple[Truths, Truths]:
    """Above and below inclusive bounds, compared in float32 as the masks compare; (m, B) and (m,) each."""
    single = values.astype(np.float32)
    return single > upper.astype(np.float32)[:, None], single < lower.astype(np.float32)[:, None]


def measure_rows(
    values: Numbers, tokens: Numbers, outside: tuple[Truths, Truths], *, clamp: tuple[Numbers, Numbers], about: float
) -> Measures:
    """Columns of m quantities that all tokens of a row share.

    Args:
        values: (m, B).
        tokens: (B,).
        outside: (m, B) above and below the bounds.
        clamp: (m,) bounds of c, infinite where open.
    """
    above, below = outside
    deviation = np.clip(values, clamp[0][:, None], clamp[1][:, None]) - about
    weighted = [tokens * each for each in (values, np.square(values), deviation, np.square(deviation))]
    return Measures(
        np.zeros(len(values), dtype=np.bool_),
        np.full(len(values), about),
        np.stack([*weighted, values, values, tokens * above, tokens * below]),
    )


class Batch(Protocol):
    """The log-probs and the mask of a batch, read by whatever suits the device that they are on."""

    @property
    def device(self) -> torch.device: ...

    def sweep(self, quantities: Sequence[Quantity]) -> tuple[Columns, Measures]:
        """One pass: the columns, and those of the quantities, by token."""

    def token_weights(self, quantity: Quantity, factor: float) -> Tensor:
        """Weights of ``capped`` or ``banded``, divided by ``factor``, in float32 or wider; 0 off valid. They lie as the
        batch does."""

    def row_weights(self, rows: Numbers) -> Tensor:
        """The weight of each token's row, (B,), likewise."""

    def kept(self, rows: Truths, quantities: Sequence[Quantity]) -> tuple[Tensor, Numbers]:
        """The mask, in its own dtype, without rejected ``rows``, (B,), and tokens that lie outside the bounds of a
        quantity; and the valid tokens of each row that are gone, (B,)."""
