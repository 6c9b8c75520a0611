"""Masks: the aggregate that each mask compares with its bounds, and the tokens outside the bounds.

An aggregate turns a unit's ratios into one number. Validation, start-up checks, and offline and online calibration all
read ``AGGREGATES``. The liveness proof does not: ``proof/inverses.py`` defines each aggregate independently. The
formulas are in docs/correction_keys.md, the metrics of a mask in ``telemetry.measure_keep``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .ratios import EXP_CLAMP, compute_divergence, compute_excess, exceeds_bounds
from .units import Level, MaskWhen, Part, Sign, Units

TokenValue = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps a log-ratio and both policies' log-probs to each token's value: float64, 0 where the policies agree."""


@dataclass(frozen=True)
class Aggregate:
    """The number that a mask compares for each unit, computed from the ratios r_t or the ages of the unit's tokens.

    Attributes:
        name: value of ``masks.<name>.aggregate``.
        reduce: how the tokens' values are reduced to the unit's value. ``each``: all tokens must lie within the bounds.
            ``batch``: one cutoff for the whole batch, see ``compute_second_moment_cutoff``. ``oldest``: the age of the
            oldest token, in versions of the weights, regardless of its ratio.
        token: computes a token's value; if None, the value is the token's log-ratio.
        finish: converts the unit's reduced value to the value that is compared.
        on_ratio: True if bounds are given as ratios and compared in log space; otherwise they are compared as given.
        least, greatest: range of the compared value; a mask whose bounds contain this range drops nothing.
        usual: commonly used bounds, lower and upper; None for an open side.
        at: returns the compared value of a unit whose log-ratios all equal the given number of nats.
        widest: greatest distance from perfect agreement to which a moving bound may be set.
        single: name of the aggregate that has the same value for single tokens and replaces this one; empty for none.
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
        """True if the value is never negative, so that only an upper bound has an effect."""
        return self.least == 0

    @property
    def of_age(self) -> bool:
        """True if the aggregate is the age of the weights, which does not compare policies."""
        return self.reduce == "oldest"

    @property
    def of_log_ratios(self) -> bool:
        """True if the aggregate is a sum or mean of log-ratios, which ``delta`` can bound."""
        return self.token is None and self.reduce in ("sum", "mean")


BINARY_EPS: Final = 1e-6
"""Probabilities are clamped to [eps, 1 - eps] before division by the mass of the other tokens, as in prime-rl."""


def _binary_divergences(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the binary KL(p, q) and KL(q, p) of the sampled token (probabilities p, q) against all others; float64.

    KL(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).
    """
    # log(1 - p) is computed from the log-probs, because 1 - p loses digits if p is near 1.
    near = math.log(BINARY_EPS), math.log1p(-BINARY_EPS)
    log_p, log_q = (each.detach().double().clamp(*near) for each in (numerator, denominator))
    log_p_rest, log_q_rest = (torch.log(-torch.expm1(each)) for each in (log_p, log_q))
    ratio, rest = log_p - log_q, log_p_rest - log_q_rest
    p, q = log_p.exp(), log_q.exp()
    return (p * ratio + (1 - p) * rest).clamp(min=0), (-q * ratio - (1 - q) * rest).clamp(min=0)


def _probability_gap(log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute p_numerator - p_denominator of the sampled token, float64."""
    return numerator.detach().double().exp() - denominator.detach().double().exp()


def _greater_binary_divergence(log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute max(KL(p, q), KL(q, p)), float64."""
    return torch.maximum(*_binary_divergences(numerator, denominator))


def _forward_binary_divergence(log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute KL(q, p) in float64; q is the denominator's policy, which sampled the token, and p the numerator's."""
    return _binary_divergences(numerator, denominator)[1]


def _family(measure: str, mean: float, other: float, at: Callable[[float], float]) -> list[Aggregate]:
    """Build the entries for sum, mean and max of a per-token divergence; only k1 can be negative."""
    signed = measure == "k1"
    bounds: tuple[tuple[Literal["sum", "mean", "max"], float], ...] = (("sum", other), ("mean", mean), ("max", other))
    return [
        Aggregate(
            f"{measure}_{reduce}",
            reduce,
            (-bound if signed else None, bound),
            lambda log_ratio, numerator, denominator: compute_divergence(measure, log_ratio),
            least=-math.inf if signed else 0.0,
            at=at,
            single="" if reduce == "sum" else f"{measure}_sum",
        )
        for reduce, bound in bounds
    ]


def _of_probabilities(
    name: str, reduce: Literal["each", "mean"], usual: float, token: TokenValue, single: str = ""
) -> Aggregate:
    """Build the entry of an aggregate whose values lie in a fixed range for any log-ratio."""
    signed = token is _probability_gap
    greatest = 1.0 if signed else (1 - 2 * BINARY_EPS) * math.log((1 - BINARY_EPS) / BINARY_EPS)
    return Aggregate(
        name,
        reduce,
        (-usual if signed else None, usual),
        token,
        least=-1.0 if signed else 0.0,
        greatest=greatest,
        at=lambda nats: math.inf,
        widest=0.99 if signed else 13.0,
        single=single,
    )


_ENTRIES: Final = (
    Aggregate("product", "sum", (0.5, 2.0), on_ratio=True, widest=600.0),  # exp(600) still fits float64
    Aggregate("geometric", "mean", (0.99, 1.01), on_ratio=True, widest=EXP_CLAMP, single="product"),
    Aggregate("any", "each", (0.5, 2.0), on_ratio=True, widest=EXP_CLAMP),
    *_family("k1", 0.01, 0.7, float),
    *_family("k2", 0.01, 0.2, lambda nats: nats**2 / 2),
    *_family("k3", 0.01, 0.2, lambda nats: math.expm1(nats) - nats),
    *_family("tv", 0.01, 0.2, lambda nats: math.expm1(nats) / 2),
    _of_probabilities("binary_tv", "each", 0.2, _probability_gap),
    _of_probabilities("binary_tv_mean", "mean", 0.2, _probability_gap, single="binary_tv"),
    Aggregate("binary_tv_sum", "sum", (-0.2, 0.2), _probability_gap, at=lambda nats: math.inf, single="binary_tv"),
    _of_probabilities("binary_kl", "each", 0.1, _greater_binary_divergence),
    _of_probabilities("binary_kl_forward", "each", 0.05, _forward_binary_divergence),
    _of_probabilities("binary_kl_forward_mean", "mean", 3e-3, _forward_binary_divergence, single="binary_kl_forward"),
    Aggregate(
        "exp_abs_mean",
        "mean",
        (None, 2.0),
        lambda log_ratio, numerator, denominator: compute_excess(log_ratio.abs()),
        on_ratio=True,
        least=0.0,
        at=abs,
        widest=EXP_CLAMP,
        finish=torch.log1p,
    ),
    Aggregate(
        "second_moment",
        "batch",
        (None, 0.2),
        lambda log_ratio, numerator, denominator: log_ratio.double().square(),
        at=lambda nats: nats**2,
    ),
    Aggregate("staleness", "oldest", (None, 4.0), least=0.0, at=lambda nats: math.inf),
)
AGGREGATES: Final[Mapping[str, Aggregate]] = {entry.name: entry for entry in _ENTRIES}
Ratio = Literal["rollout", "full", "ppo"]


def get_usual_bounds(aggregate: str) -> tuple[float | None, float | None]:
    """Return the common bounds on an aggregate; None for an open side.

    Example:
        >>> get_usual_bounds("geometric"), get_usual_bounds("k3_mean")
        ((0.99, 1.01), (None, 0.01))
    """
    return AGGREGATES[aggregate].usual if aggregate in AGGREGATES else (None, 0.2)


@dataclass(frozen=True)
class MaskSpec(Part):
    """Bounds on an aggregate of a policy ratio, or on the age of the weights; units outside the bounds get no gradient.

    Attributes:
        ratio: ``rollout`` pi_old / mu, ``full`` pi / mu, ``ppo`` pi / pi_old. A mask on age has no ratio; it is applied
            together with masks on ``rollout``, so this attribute is ``rollout``.
        level: the tokens that share one decision, see ``WeightSpec.level``.
        aggregate: the number that is computed from these tokens and compared with the bounds: a key of
            ``AGGREGATES``.
        lower, upper: inclusive bounds on the aggregate; None leaves a side open.
        when: tokens to which the mask applies: those with negative or with positive advantage, or any; ``outward``:
            those with A log r > 0, whose update moves the two policies further apart (VACO); ``post_tool``: those after
            the first tool result in their row, regardless of the advantage.
        sign: the advantage that ``when`` reads: ``row`` is the mean over the row's valid tokens, ``token`` is each
            token's own advantage.
        delta: the bound in OPSM's notation, in nats: lower = exp(-delta); None if lower and upper were given.
        budget: with ``second_moment``, the tokens with the largest (log r)^2 are dropped until the mean over the rest
            of the batch is at most this value; None otherwise.
        by_staleness: factors that multiply |log bound| for units whose oldest token is 0, 1, ... versions old; the last
            factor also applies to older units. None: the same bound for all units.
        by_position: |log bound| is multiplied by a token's position to this power, see ``WeightSpec.by_position``.
    """

    ratio: Ratio
    level: Level
    aggregate: str
    lower: float | None
    upper: float | None
    when: MaskWhen
    sign: Sign = "row"
    delta: float | None = None
    budget: float | None = None
    by_staleness: tuple[float, ...] | None = None
    by_position: float | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values from which ``from_mapping`` builds an equal spec."""
        if self.entry.of_age:
            kept = ("level", "aggregate", "upper", "when", "sign")
            return {name: getattr(self, name) for name in kept}
        mapping: dict[str, Any] = {"ratio": self.ratio, "level": self.level, "aggregate": self.aggregate}
        if self.delta is not None:
            mapping["delta"] = self.delta
        elif self.budget is not None:
            mapping["budget"] = self.budget
        else:
            mapping |= {"lower": self.lower, "upper": self.upper}
        mapping |= {"when": self.when, "sign": self.sign}
        # An unset key is left out, because the fingerprints of corrections that do not use it must stay the same.
        mapping |= {} if self.by_staleness is None else {"by_staleness": list(self.by_staleness)}
        return mapping | ({} if self.by_position is None else {"by_position": self.by_position})

    @property
    def entry(self) -> Aggregate:
        """The aggregate's entry in ``AGGREGATES``."""
        return AGGREGATES[self.aggregate]

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Inclusive bounds on the compared value; bounds on a ratio are given as log-ratios, in nats.

        An open side is infinite. Both sides of ``second_moment`` are open, because its cutoff depends on the batch.
        """
        if self.delta is not None:
            return -self.delta, math.inf
        scale = math.log if self.entry.on_ratio else float
        lower = -math.inf if self.lower is None else scale(self.lower)
        return lower, math.inf if self.upper is None else scale(self.upper)


_TOKEN = math.log(1e5)
"""Largest commonly used bound on one token, in nats: outlier masks use ratios down to 1e-4."""
_MEAN = math.log(10.0)
"""Largest bound worth proposing on a unit's mean, in nats per token; policies diverge long before reaching it."""


def compute_arithmetic_limit(mask: MaskSpec) -> float:
    """Compute the largest distance from agreement that clamped log-ratios allow; infinite for a sum over tokens.

    Example:
        >>> compute_arithmetic_limit(MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"))
        20.0
    """
    summed = mask.level != "token" and mask.entry.reduce == "sum"
    return math.inf if summed else mask.entry.at(EXP_CLAMP)


def compute_proposal_limit(mask: MaskSpec) -> float:
    """Compute the largest distance from agreement worth proposing as a bound; larger bounds are not used in practice.

    Example:
        >>> limit = compute_proposal_limit(MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"))
        >>> round(math.exp(limit), 9)  # a mean ratio of 10
        10.0
    """
    if math.isinf(compute_arithmetic_limit(mask)):
        return mask.entry.at(EXP_CLAMP)
    averaged = mask.entry.reduce == "batch" or (mask.level != "token" and mask.entry.reduce == "mean")
    return mask.entry.at(_MEAN if averaged else _TOKEN)


def find_outside(
    spec: MaskSpec,
    log_ratio: Tensor,
    units: Units,
    *,
    numerator: Tensor,
    denominator: Tensor,
    cutoff: float | None = None,
) -> Tensor:
    """Flag the tokens of units whose value lies outside the inclusive bounds.

    Aggregates are accumulated in float64 and compared in float32, and the bound's log is rounded to float32 too, so a
    unit whose mean or sum equals that log in float32 lies inside. With ``delta`` and ``when=negative``, this is
    off-policy sequence masking, mean log(mu/pi) > delta (DeepSeek-V3.2, eq. 9).

    Args:
        log_ratio: (B, T), or (N,) packed, float64, log r_t in nats, 0 outside ``units.valid``.
        units: the units of level ``spec.level``.
        numerator, denominator: log-probs of the ratio's two policies, in the shape of ``log_ratio``; read only by
            ``binary_*`` aggregates.
        cutoff: with ``second_moment``, the greatest (log r)^2 that is kept, see ``compute_second_moment_cutoff``.

    Returns:
        Bool in the shape of ``log_ratio``, meaningless outside ``units.valid``.

    Example:
        >>> from .units import partition_units
        >>> log_r, valid = torch.tensor([[0.2, 0.0], [0.0, 0.01]]).double(), torch.ones(2, 2, dtype=torch.bool)
        >>> spec = MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any")  # mean ratios e^0.1 and e^0.005
        >>> units = partition_units("sequence", valid, None)
        >>> find_outside(spec, log_r, units, numerator=log_r, denominator=log_r).tolist()
        [[True, True], [False, False]]
    """
    aggregate = spec.entry
    value = _by_token(aggregate, units, log_ratio, numerator, denominator)
    lower, upper = choose_limits(spec, units)
    if aggregate.reduce == "batch":
        if cutoff is None:
            raise ValueError(f"{aggregate.name} needs the cutoff of the batch. Pass the result of batch_constants.")
        return value > cutoff
    if aggregate.reduce != "each":
        outside = exceeds_bounds(_reduce(aggregate, units, value), lower, upper)
        return units.spread(outside & units.exists if aggregate.reduce == "max" else outside)
    flags = exceeds_bounds(
        value, *(units.spread(each) if isinstance(each, Tensor) else each for each in (lower, upper))
    )
    return units.spread(flags if units.level == "token" else units.greatest(flags) > 0)


def compute_extremes(
    mask: MaskSpec, units: Units, log_value: Tensor, *, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the least and greatest values that ``find_outside`` compares with a unit's bounds; both must lie inside.

    Args:
        units, log_value, numerator, denominator: see ``find_outside``.

    Returns:
        (B, U) float64 each, not yet rounded to float32, in nats of log-ratio for aggregates that are ratios. The two
        values differ only for aggregates that bound each token separately. For ``second_moment``, which the batch's
        cutoff bounds, they are (log r)^2. They are meaningless for a unit without a token.

    Example:
        >>> from .units import partition_units
        >>> log_r, valid = torch.tensor([[0.5, -0.25, 9.0]]).double(), torch.tensor([[True, True, False]])
        >>> spec = MaskSpec("rollout", "sequence", "any", 0.5, 2.0, "any")
        >>> units = partition_units("sequence", valid, None)
        >>> least, greatest = compute_extremes(spec, units, log_r, numerator=log_r, denominator=log_r)
        >>> least.item(), greatest.item()
        (-0.25, 0.5)
    """
    aggregate = mask.entry
    value = _by_token(aggregate, units, log_value, numerator, denominator)
    if aggregate.reduce == "each":
        return -units.greatest(-value), units.greatest(value)
    value = _reduce(aggregate, units, value)
    return value, value


def _reduce(aggregate: Aggregate, units: Units, value: Tensor) -> Tensor:
    """Reduce per-token values to one compared value per unit; ``batch`` compares single tokens."""
    match aggregate.reduce:
        case "oldest":
            value = units.oldest
        case "max":
            value = units.greatest(value)
        case "mean":
            value = units.mean(value)
        case "sum":
            value = units.total(value)
    return value if aggregate.finish is None else aggregate.finish(value)


def _by_token(aggregate: Aggregate, units: Units, log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    if aggregate.token is None:
        return log_ratio
    value = aggregate.token(log_ratio, numerator, denominator)
    # A sum or mean must not include values outside the units; the other reductions already exclude these values.
    return torch.where(units.valid, value, 0.0) if aggregate.reduce in ("sum", "mean", "max") else value


def choose_limits(spec: MaskSpec, units: Units) -> tuple[Tensor | float, Tensor | float]:
    """Choose each unit's bounds by its age or length, in float32 as in the comparison, or return ``spec.limits``.

    Example:
        >>> from .units import partition_units
        >>> spec = MaskSpec("rollout", "token", "product", None, 1.01, "any", by_staleness=(1.0, 2.0))
        >>> ages = torch.tensor([[0.0, 1.0, 7.0]])
        >>> lower, upper = choose_limits(spec, partition_units("token", ages >= 0, None, ages=ages))
        >>> lower, [round(each, 4) for each in upper.exp()[0].tolist()]  # 1.01 and, from age 1 on, its square
        (-inf, [1.01, 1.0201, 1.0201])
    """
    if spec.by_staleness is None and spec.by_position is None:
        return spec.limits
    lower, upper = (units.scale_limit(limit, spec.by_staleness, spec.by_position) for limit in spec.limits)
    return lower, upper


def compute_second_moment_cutoff(budget: float, *log_ratios: Tensor) -> float:
    """Compute the greatest (log r)^2 that M2PO keeps, so that the mean over all kept tokens is at most ``budget``.

    Tokens with the same value are kept or dropped together. Zheng et al. 2025, Prosperity before Collapse.

    Args:
        log_ratios: log-ratios of all valid tokens in the batch, (N,) each, in any number of blocks.

    Returns:
        -1 if no token may be kept; infinity if all tokens may be kept.

    Example:
        >>> compute_second_moment_cutoff(0.5, torch.tensor([0.0, 1.0, 2.0]))  # means of squares: 0, 1/2, 5/3
        1.0
    """
    # The mean of values up to the budget is at most the budget, so only the few larger values must be sorted.
    within: list[tuple[Tensor, Tensor]] = []
    beyond: list[Tensor] = []
    for log_ratio in log_ratios:
        if not len(log_ratio):
            continue
        squares = log_ratio.double().square()
        above = squares > budget
        beyond.append(squares[above])
        squares = torch.where(above, 0.0, squares)
        within.append((squares.sum(), squares.amax()))
    ordered = torch.cat(beyond).sort().values if beyond else torch.zeros(0)
    if not len(ordered):
        return float("inf")
    total, greatest = (torch.stack(column) for column in zip(*within, strict=True))
    tokens_within = sum(map(len, log_ratios)) - len(ordered)
    count = torch.arange(1, len(ordered) + 1, device=ordered.device) + tokens_within
    means = (ordered.cumsum(0) + total.sum()) / count
    # Equal values are kept or dropped together, so a value is judged by the mean that includes all equal values.
    last_of_equals = torch.ones_like(ordered, dtype=torch.bool)
    last_of_equals[:-1] = ordered[1:] != ordered[:-1]
    admissible = ordered[last_of_equals & (means <= budget)]
    if not len(admissible):
        return float(greatest.max()) if tokens_within else -1.0
    return float("inf") if admissible[-1] == ordered[-1] else float(admissible[-1])
