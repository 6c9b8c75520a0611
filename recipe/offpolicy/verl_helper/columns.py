"""What one pass over a batch leaves of it: a few numbers a row, from which every metric and decision comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Kind = Literal["raw", "capped", "banded", "k1", "k2", "k3"]
"""A token's weight before its bounds, min(w, upper), or 0 outside both bounds; and k1, k2, k3 of log pi_old / mu."""


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
        k2, k3, k2_max, k3_max: sums and greatest values of k2 and k3, 0 for no token.
        chi2: sum of rho^2 - 1.
    """

    response: Tensor
    tokens: Tensor
    old: Tensor
    rollout: Tensor
    log_ratio: Tensor
    k2: Tensor
    k3: Tensor
    k2_max: Tensor
    k3_max: Tensor
    chi2: Tensor


@dataclass(frozen=True)
class Measure:
    """Columns of one quantity v that tokens have, or that all tokens of a row share; each (B,) float64.

    Attributes:
        level: whether shares of what lies outside the bounds count tokens or rows.
        about: a guess of the mean, about which deviations are taken.
        total, square: sums of v and v^2 over the row's tokens.
        deviation, squared_deviation: sums of c - about and its square, c being v clamped to its bounds.
        least, greatest: extremes of v; without meaning for a row without a token.
        above, below: tokens beyond the upper and the lower bound.
    """

    level: Literal["token", "sequence"]
    about: float
    total: Tensor
    square: Tensor
    deviation: Tensor
    squared_deviation: Tensor
    least: Tensor
    greatest: Tensor
    above: Tensor
    below: Tensor


def measure_rows(
    values: Tensor, tokens: Tensor, above: Tensor, below: Tensor, *, clamp: tuple[float, float], about: float
) -> Measure:
    """Columns of a quantity that all tokens of a row share.

    Args:
        values, tokens: (B,) float64.
        above, below: (B,) bool.
        clamp: bounds of c, infinite where open.
    """
    deviation = values.clamp(*clamp) - about
    return Measure(
        level="sequence",
        about=about,
        total=tokens * values,
        square=tokens * values.square(),
        deviation=tokens * deviation,
        squared_deviation=tokens * deviation.square(),
        least=values,
        greatest=values,
        above=tokens * above,
        below=tokens * below,
    )


class Batch(Protocol):
    """The log-probs and the mask of a batch, read by whatever suits the device that they are on."""

    def sweep(self, quantities: Sequence[Quantity]) -> tuple[Columns, list[Measure]]:
        """One pass: the columns, and those of each quantity, level ``token``."""

    def token_weights(self, quantity: Quantity, factor: Tensor | float) -> Tensor:
        """(B, T) weights of ``capped`` or ``banded``, divided by ``factor``, in float32 or wider; 0 off valid."""

    def row_weights(self, rows: Tensor) -> Tensor:
        """(B, T) the weight of each token's row, (B,), likewise."""

    def kept(self, rows: Tensor, quantities: Sequence[Quantity]) -> tuple[Tensor, Tensor]:
        """The mask, in its own dtype, without rejected ``rows``, (B,) bool, and tokens that lie outside the bounds of
        a quantity; and the valid tokens of each row that are gone, (B,) float64."""
