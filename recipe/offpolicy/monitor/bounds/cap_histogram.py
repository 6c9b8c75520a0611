"""What raw weights would have for an effective sample size under any cap, in sums by bin that add up.

The ESS is that of ``offpolicy/weight/ess``, (sum w)^2 / (n sum w^2) over tokens (Kish 1965, Survey Sampling): each
token counts once, with the weight of its unit. A cap c replaces each weight by min(w, c). With c at the edge of a bin,
the weights below it enter by their sums and those above by their number, so that the ESS under it is exact and not an
estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from ...correction import Statistic, WeightSpec
from ...correction.moving_bounds import WEIGHT
from ...correction.ratios import EXP_CLAMP, clamp_and_exp, compute_excess
from ...correction.units import Units
from ...correction.weights import compute_log_weight

_PER_DECADE: Final = 64
_LEAST: Final = -5
CAPS: Final = tuple(
    10 ** (i / _PER_DECADE) for i in range(_PER_DECADE * _LEAST, math.floor(_PER_DECADE * math.log10(EXP_CLAMP)) + 1)
)
"""Log of the greatest weight of each bin but the last, in nats, 1e-5 to 19.8, 3.7 % apart; the first bin holds what is
smaller too, the last one what lies beyond."""

TOKENS, TOTAL, SQUARE = f"{WEIGHT}/tokens", f"{WEIGHT}/total", f"{WEIGHT}/square"
"""Sums by bin over tokens: of 1, of w and of w^2."""
UNITS, ESS = f"{WEIGHT}/units", f"{WEIGHT}/ess"
"""The number of units that have a token, and the ESS under the cap in force."""


def cap_sums(spec: WeightSpec, log_ratio: Tensor, units: Units) -> dict[str, Tensor]:
    """What the weights of some rows add to each sum.

    Args:
        spec: of a kind that truncates or clips, with the cap in force. Its lower bound acts, its cap does not.
        log_ratio: (B, T) float64, log r_t in nats, 0 where not valid.
        units: of ``spec.level``.

    Returns:
        Float64, where ``log_ratio`` is: ``TOKENS``, ``TOTAL`` and ``SQUARE`` (len(CAPS) + 1,) each, ``UNITS`` (1,),
        and ``ESS`` (3,), the parts of a ``Reduction.ESS``.
    """
    value = compute_log_weight(spec, log_ratio, units)
    if spec.lower is not None:
        value = value.clamp(min=math.log(spec.lower))
    count = units.tokens
    raw = clamp_and_exp(value)
    counted = torch.stack([count, count * raw, count * raw.square()])
    where = torch.bucketize(value, _edges(value.device)).flatten()
    bins = torch.zeros(3, len(CAPS) + 1, dtype=torch.float64, device=value.device)
    bins.scatter_add_(1, where.expand(3, -1), counted.flatten(1))
    capped = value if spec.upper is None else value.clamp(max=math.log(spec.upper))
    above = compute_excess(capped)
    return {
        TOKENS: bins[0],
        TOTAL: bins[1],
        SQUARE: bins[2],
        UNITS: (count > 0).sum(dtype=torch.float64)[None],
        ESS: torch.stack([(count * above).sum(), (count * above.square()).sum(), count.sum()]),
    }


@cache
def _edges(device: torch.device) -> Tensor:
    return torch.tensor(CAPS, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class CapSums:
    """The sums of ``cap_sums`` in floats, over any number of rows."""

    tokens: Sequence[float]
    total: Sequence[float]
    square: Sequence[float]
    units: float

    @classmethod
    def of(cls, seen: Mapping[str, Statistic]) -> CapSums | None:
        """Those among merged statistics; None where nothing was reported."""
        if TOKENS not in seen:
            return None
        tokens, total, square = ([float(part) for part in seen[name].parts] for name in (TOKENS, TOTAL, SQUARE))
        return cls(tokens, total, square, float(seen[UNITS].parts[0]))


def ess_by_cap(sums: CapSums) -> list[float]:
    """ESS under a cap at each of ``CAPS``, and at last without one; it falls from each to the next. NaN for no token.

    A higher cap makes the weights more unequal in the Lorenz order, and the ESS is Schur-concave in them.
    """
    count = sum(sums.tokens)
    if not count:
        return [math.nan] * (len(CAPS) + 1)
    found = []
    below = zip(accumulate(sums.tokens), accumulate(sums.total), accumulate(sums.square), strict=True)
    for cap, (inside, total, square) in zip((*map(math.exp, CAPS), 0.0), below, strict=True):
        weights, squares = total + (count - inside) * cap, square + (count - inside) * cap * cap
        found.append(weights * weights / (count * squares))
    return found


def widest_cap(sums: CapSums, target: float) -> float:
    """The greatest of ``CAPS``, log of a cap in nats, under which the ESS is ``target`` or more.

    Returns:
        Infinite where the ESS is that without any cap, 0 where it is that under none of them, NaN where nothing was
        counted.
    """
    if not sum(sums.tokens):
        return math.nan
    reached = (place for place, ess in enumerate(ess_by_cap(sums)) if ess >= target * (1 - 1e-12))
    widest = max(reached, default=None)
    return 0.0 if widest is None else (*CAPS, math.inf)[widest]
