"""Table of aggregates. An aggregate turns a unit's ratios into the number that a mask compares with its bounds.

Masks, validation, start-up checks, and offline and online calibration all read this table. The liveness proof does not:
``proof/inverses.py`` states each aggregate independently. The formulas are in docs/correction_keys.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from .ratios import EXP_CLAMP, compute_divergence, compute_excess

TokenValue = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps a log-ratio and both policies' log-probs to each token's value: float64, 0 where the policies agree."""


@dataclass(frozen=True)
class Aggregate:
    """The number that a mask compares for each unit, computed from the ratios r_t or the ages of the unit's tokens.

    Attributes:
        name: value of ``masks.<name>.aggregate``.
        reduce: how the tokens' values are reduced to the unit's value. ``each`` compares every token, and all tokens
            must lie within the bounds. ``batch`` uses one cutoff for the whole batch, see
            ``masks.compute_second_moment_cutoff``. ``oldest`` is the age of the oldest token, in versions of the
            weights, whatever its ratio.
        token: computes a token's value; if None, the value is the token's log-ratio.
        finish: converts the unit's reduced value to the value that is compared.
        on_ratio: True if bounds are given as ratios and compared in log space; otherwise they are compared as given.
        least, greatest: range of the compared value; a mask whose bounds contain this range never acts.
        usual: commonly used bounds, lower and upper; None for an open side.
        at: returns the compared value of a unit whose log-ratios all equal the given number of nats.
        widest: greatest distance from agreement that a moving bound may reach.
        single: name of the aggregate to use for single tokens instead, because both have the same value there; empty if
            this aggregate is also used for single tokens.
    """

    name: str
    reduce: Literal["sum", "mean", "max", "each", "batch", "oldest"]
    usual: tuple[float | None, float | None]
    token: TokenValue | None = None
    on_ratio: bool = False
    least: float = -math.inf
    greatest: float = math.inf
    at: Callable[[float], float] = float
    widest: float = math.inf
    single: str = ""
    finish: Callable[[Tensor], Tensor] | None = None

    @property
    def one_sided(self) -> bool:
        """True if the value is never negative, so that only an upper bound can act."""
        return self.least == 0

    @property
    def of_age(self) -> bool:
        """True if the aggregate is the age of the weights, which does not compare policies."""
        return self.reduce == "oldest"

    @property
    def of_log_ratios(self) -> bool:
        """True if the aggregate is a sum or mean of log-ratios, which ``delta`` can bound."""
        return self.token is None and self.reduce in ("sum", "mean")


def _probability_gap(log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute p_numerator - p_denominator of the sampled token, float64."""
    return numerator.detach().double().exp() - denominator.detach().double().exp()


BINARY_EPS: Final = 1e-6
"""Probabilities are clamped to [eps, 1 - eps] before division by the mass of the other tokens, as in prime-rl."""


def _binary_divergences(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Compute KL(p, q) and KL(q, p) of the sampled token, whose probabilities are p and q, against all others; float64.

    KL(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).
    """
    # log(1 - p) is computed from the log-probs, because 1 - p loses digits if p is near 1.
    near = math.log(BINARY_EPS), math.log1p(-BINARY_EPS)
    log_p, log_q = (each.detach().double().clamp(*near) for each in (numerator, denominator))
    log_p_rest, log_q_rest = (torch.log(-torch.expm1(each)) for each in (log_p, log_q))
    ratio, rest = log_p - log_q, log_p_rest - log_q_rest
    p, q = log_p.exp(), log_q.exp()
    return (p * ratio + (1 - p) * rest).clamp(min=0), (-q * ratio - (1 - q) * rest).clamp(min=0)


def _greater_binary_divergence(log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute max(KL(p, q), KL(q, p)), float64."""
    return torch.maximum(*_binary_divergences(numerator, denominator))


def _forward_binary_divergence(log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute KL(q, p) from the denominator's policy, which sampled the token, to the numerator's policy, float64."""
    return _binary_divergences(numerator, denominator)[1]


def _excess_of_distance(log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute exp |log r| - 1, float64."""
    return compute_excess(log_ratio.abs())


def _square(log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute (log r)^2, float64."""
    return log_ratio.double().square()


def _divergence(name: str, log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    return compute_divergence(name, log_ratio)


def _family(measure: str, mean: float, other: float, at: Callable[[float], float], *, signed: bool) -> list[Aggregate]:
    """Build the entries for sum, mean and max of a per-token divergence."""
    bounds: tuple[tuple[Literal["sum", "mean", "max"], float], ...] = (("sum", other), ("mean", mean), ("max", other))
    return [
        Aggregate(
            f"{measure}_{reduce}",
            reduce,
            (-bound if signed else None, bound),
            partial(_divergence, measure),
            least=-math.inf if signed else 0.0,
            at=at,
            single="" if reduce == "sum" else f"{measure}_sum",
        )
        for reduce, bound in bounds
    ]


_BINARY_KL: Final[tuple[tuple[str, Literal["each", "mean"], float, TokenValue, str], ...]] = (
    ("binary_kl", "each", 0.1, _greater_binary_divergence, ""),
    ("binary_kl_forward", "each", 0.05, _forward_binary_divergence, ""),
    ("binary_kl_forward_mean", "mean", 3e-3, _forward_binary_divergence, "binary_kl_forward"),
)
_ENTRIES: Final = (
    Aggregate("product", "sum", (0.5, 2.0), on_ratio=True, widest=600.0),  # exp(600) still fits float64
    Aggregate("geometric", "mean", (0.99, 1.01), on_ratio=True, widest=EXP_CLAMP, single="product"),
    Aggregate("any", "each", (0.5, 2.0), on_ratio=True, widest=EXP_CLAMP),
    *_family("k1", 0.01, 0.7, float, signed=True),
    *_family("k2", 0.01, 0.2, lambda nats: nats**2 / 2, signed=False),
    *_family("k3", 0.01, 0.2, lambda nats: math.expm1(nats) - nats, signed=False),
    *_family("tv", 0.01, 0.2, lambda nats: math.expm1(nats) / 2, signed=False),
    Aggregate(
        "binary_tv",
        "each",
        (-0.2, 0.2),
        _probability_gap,
        least=-1.0,
        greatest=1.0,
        at=lambda nats: math.inf,  # bounded by its range, not by a log-ratio
        widest=0.99,
    ),
    Aggregate(
        "binary_tv_mean",
        "mean",
        (-0.2, 0.2),
        _probability_gap,
        least=-1.0,
        greatest=1.0,
        at=lambda nats: math.inf,
        widest=0.99,
        single="binary_tv",
    ),
    Aggregate("binary_tv_sum", "sum", (-0.2, 0.2), _probability_gap, at=lambda nats: math.inf, single="binary_tv"),
    *(
        Aggregate(
            name,
            reduce,
            (None, usual),
            value,
            least=0.0,
            greatest=(1 - 2 * BINARY_EPS) * math.log((1 - BINARY_EPS) / BINARY_EPS),
            at=lambda nats: math.inf,
            widest=13.0,
            single=single,
        )
        for name, reduce, usual, value, single in _BINARY_KL
    ),
    Aggregate(
        "exp_abs_mean",
        "mean",
        (None, 2.0),
        _excess_of_distance,
        on_ratio=True,
        least=0.0,
        at=abs,
        widest=EXP_CLAMP,
        finish=torch.log1p,
    ),
    Aggregate("second_moment", "batch", (None, 0.2), _square, at=lambda nats: nats**2),
    Aggregate("staleness", "oldest", (None, 4.0), least=0.0, at=lambda nats: math.inf),
)
AGGREGATES: Final[Mapping[str, Aggregate]] = {entry.name: entry for entry in _ENTRIES}
