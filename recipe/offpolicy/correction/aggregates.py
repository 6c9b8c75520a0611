"""Table of aggregates: how a unit's ratios become the number that a mask compares with its bounds.

Everything that asks about an aggregate reads this table: masks, validation, start-up checks, calibration offline and
online. The liveness proof does not: ``proof/trials.py`` states each by itself. Formulas: docs/correction_keys.md.
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
"""Log-ratio and the log-probs of numerator and denominator -> value of each token, float64, 0 where policies agree."""


@dataclass(frozen=True)
class Aggregate:
    """Number of a unit that a mask compares, computed from its tokens' ratios r_t, or from their age.

    Attributes:
        name: as ``masks.<name>.aggregate`` gives it.
        reduce: from values of tokens to that of the unit; ``each`` compares every token, all of which must lie inside,
            ``batch`` a cutoff fixed for the whole batch, see ``masks.compute_second_moment_cutoff``, and ``oldest`` the
            age of the oldest token, in versions of the weights, whatever its ratio.
        token: value of a token; None: its log-ratio.
        finish: from the unit's reduced value to what is compared.
        on_ratio: bounds are given as ratios and compared in log space; if not, they are given as they are compared.
        least, greatest: range of what is compared; a mask that holds all of it never acts.
        usual: bounds in use, lower and upper; None for an open side.
        at: what is compared where every log-ratio is so many nats.
        widest: greatest distance from agreement that an online bound may move to.
        single: the aggregate with the same value on single tokens that is to be named instead; empty: itself.
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
        """True for the age of the weights, which compares no policies."""
        return self.reduce == "oldest"

    @property
    def of_log_ratios(self) -> bool:
        """True for a sum or mean of log ratios, which ``delta`` can bound."""
        return self.token is None and self.reduce in ("sum", "mean")


def _probability_gap(log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute p_numerator - p_denominator of the sampled token, float64."""
    return numerator.detach().double().exp() - denominator.detach().double().exp()


BINARY_EPS: Final = 1e-6
"""Probabilities are clamped to [eps, 1 - eps] where the others' mass is divided by, as prime-rl does."""


def _binary_divergences(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Compute KL(p, q) and KL(q, p) of the sampled token against all others, float64, p and q the policies' masses.

    KL(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).
    """
    # Taken from the log-probs: 1 - p loses its digits where p is near 1.
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
    """Compute KL(q, p) from the policy of the denominator, which sampled, to that of the numerator, float64."""
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
    Aggregate("product", "sum", (0.5, 2.0), on_ratio=True, widest=600.0),  # exp(600) can still be written
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
        at=lambda nats: math.inf,  # no log-ratio bounds it; its range does
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
