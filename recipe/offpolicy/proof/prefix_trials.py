"""Trials of weights and masks at level ``prefix``, where each decision depends on the current token and all before it.

In each row, only one token has a nonzero log-ratio: the second token, if it exists. This token determines the value of
every later prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch.micro_batch import MicroBatch
from ..correction import BatchConstants, MaskSpec, WeightSpec
from .inverses import MOST_UPWARD, invert_aggregate, place_gap, place_kl
from .trials import (
    MEAN_WEIGHT,
    Trial,
    list_bounds,
    look_at,
    measure_step,
    mix_signs,
    place_masses,
    shift_mu,
    shift_ratio,
)

_CLEAR = 1e-4
"""Smallest difference between a prefix's value and its bound, in nats, that float32 log-probs can resolve."""

_WIDEST = {False: 0.9, True: MOST_UPWARD}
"""Largest difference of probabilities (False), and largest binary KL divergence in nats (True), of a token in a
trial."""


@dataclass(frozen=True)
class _Place:
    """Positions of a batch's response tokens, counted from 1, and the moved token of each row.

    Attributes:
        position: (B, T) float64, 0 where the mask is False.
        at: (B, 1) position of the moved token; 0 in a row without tokens.
        moved: (B, T) bool, the moved token.
        later: (B, T) bool, the moved token and all tokens after it.
    """

    position: Tensor
    at: Tensor
    moved: Tensor
    later: Tensor

    @classmethod
    def of(cls, mask: Tensor, furthest: int) -> _Place:
        position = torch.where(mask, mask.cumsum(-1), 0).double()
        at = mask.sum(-1, keepdim=True).clamp(max=furthest).double()
        moved = mask & (position == at)
        return cls(position, at, moved, mask & (position >= at))


def build_prefix_weight_trials(spec: WeightSpec, batch: MicroBatch) -> Iterator[Trial]:
    """Build trials of a per-prefix weight, with the raw weight at the moved token beyond or inside each bound."""
    mask = batch.response_mask
    place = _Place.of(mask, 2)
    mean = MEAN_WEIGHT if spec.normalize else 1.0
    constants = BatchConstants(weight_mean=mean)
    growth = _grow(place.position, spec.by_position)
    lower, upper = (None if bound is None else math.log(bound) * growth for bound in (spec.lower, spec.upper))
    logs = [math.log(0.5) if spec.lower is None else None, math.log(2.0) if spec.upper is None else None]
    wanted: list[Tensor] = [torch.full_like(place.at, each) for each in logs if each is not None]
    for bound, beyond in ((spec.lower, math.log(0.5)), (spec.upper, math.log(2.0))):
        if bound is not None:
            there = math.log(bound) * _grow(place.at, spec.by_position)
            wanted += [there + beyond, there / 2]
    sign = -1.0 if spec.when == "negative" else 1.0
    same = torch.full_like(place.position, sign)

    def build(raw: Tensor, advantages: Tensor, weighed: Tensor) -> Trial:
        value = _follow(spec.aggregate, raw, place)
        weight = value.exp()
        if spec.power is not None and spec.rate is not None:
            weight = torch.exp(spec.rate * (1 - weight)) * weight**spec.power
        if spec.kind == "reject":
            outside = torch.zeros_like(mask)
            for limit, side in ((lower, -1.0), (upper, 1.0)):
                outside |= torch.zeros_like(mask) if limit is None else side * value > side * limit
            weight = torch.where(outside, 0.0, weight)
        else:
            weight = weight if lower is None else torch.maximum(weight, lower.exp())
            weight = weight if upper is None else torch.minimum(weight, upper.exp())
        size = place.at if spec.aggregate == "geometric" else 1.0
        moved = shift_mu(spec, batch, torch.where(place.moved, raw * size, 0.0), advantages)
        factor = torch.where(weighed, weight / mean, 1.0 / mean)
        acts = bool((factor[mask] != 1).any()) and advantages is same
        return Trial("raw beyond or inside a bound" if acts else "", moved, factor, constants)

    for each in wanted:
        raw = _clear(each, spec.aggregate, place, [limit for limit in (lower, upper) if limit is not None])
        yield build(raw, same, mask)
        if spec.when != "any":
            yield build(raw, -same, torch.zeros_like(mask))
            mixed = mix_signs(mask, sign)
            yield build(raw, mixed, mask if spec.sign == "row" else mixed * sign > 0)


def build_prefix_mask_trials(spec: MaskSpec, batch: MicroBatch) -> Iterator[Trial]:
    """Build trials of a per-prefix mask, with the moved token's prefix beyond or inside each bound, for both signs."""
    signs = {"negative": (-1.0,), "positive": (1.0,)}.get(spec.when, (-1.0, 1.0))
    for side, bound in list_bounds(spec):
        for sign in signs:
            for beyond in (True, False):
                yield _build_mask_trial(spec, batch, side, bound, sign, beyond=beyond)
        if spec.when in ("negative", "positive"):
            yield _build_mask_trial(spec, batch, side, bound, -signs[0], beyond=True, looks=False)
        if spec.when != "any":
            yield _build_mask_trial(spec, batch, side, bound, signs[0], beyond=True, mixed=True)


def _build_mask_trial(
    spec: MaskSpec,
    batch: MicroBatch,
    side: float,
    bound: float,
    sign: float,
    *,
    beyond: bool,
    looks: bool = True,
    mixed: bool = False,
) -> Trial:
    """Build a trial; ``looks``: the mask applies to this advantage's sign; ``mixed``: later tokens have the other
    sign."""
    mask = batch.response_mask
    by_mass = spec.aggregate.startswith("binary_")
    # The difference for two tokens may exceed the largest difference of one token's probabilities.
    alone = by_mass and 2 * abs(bound) > _WIDEST["kl" in spec.aggregate]
    place = _Place.of(mask, 1 if alone else 2)
    advantages = mix_signs(mask, sign) if mixed else torch.full_like(batch.log_prob, sign, dtype=torch.float64)
    looked = look_at(spec, mask, advantages)
    way = looked if spec.when == "outward" else -advantages.sign()
    limit = bound * _grow(place.position, spec.by_position)
    there = bound * _grow(place.at, spec.by_position)
    value = _clear(there + side * measure_step(spec, bound) if beyond else 0.7 * there, spec.aggregate, place, [limit])
    outside = place.later & (side * _follow(spec.aggregate, value, place) > side * limit)
    if by_mass:
        gap = value * _size(spec, place)
        by_kl = "kl" in spec.aggregate
        masses = place_kl(spec.aggregate, place.moved, gap, way) if by_kl else place_gap(place.moved, gap)
        moved = place_masses(spec, batch, *masses, advantages)
        own = masses[0] - masses[1]
    else:
        total = torch.expm1(value) * place.at if spec.aggregate == "exp_abs_mean" else value * _size(spec, place)
        own = torch.zeros_like(place.position)
        spread = mask if spec.aggregate == "k1_max" else place.moved
        own[spread] = invert_aggregate(spec.aggregate, total.expand_as(own)[spread], side, way[spread])
        outside = mask & (outside.any(-1, keepdim=True)) if spec.aggregate == "k1_max" else outside
        drift = (-advantages.sign() * 1.5 * own.abs()).clamp(-0.5, 0.5)
        moved = shift_ratio(spec, batch, own, drift, advantages)
    if spec.when == "outward":
        outside = outside & (own * looked > 0)
    elif spec.when != "any":
        outside = outside & ((looked if spec.sign == "row" else advantages.sign()) == (sign if looks else -sign))
    factor = torch.where(outside, 0.0, 1.0).double()
    shows = beyond and looks and not mixed and bool(outside.any())
    return Trial(f"side {side:+.0f}" if shows else "", moved, factor, BatchConstants())


def _grow(position: Tensor, power: float | None) -> Tensor:
    return torch.ones_like(position) if power is None else position.clamp(min=1).pow(power)


def _size(spec: MaskSpec, place: _Place) -> Tensor:
    return place.at if spec.entry.reduce == "mean" else torch.ones_like(place.at)


def _follow(aggregate: str, value: Tensor, place: _Place) -> Tensor:
    """Compute each prefix's aggregate, given that it is ``value``, (B, 1), at the moved token and 0 before it."""
    if aggregate == "exp_abs_mean":
        behind = torch.log1p(torch.expm1(value) * place.at / place.position.clamp(min=1))
    elif aggregate == "geometric" or aggregate.endswith("_mean"):
        behind = value * place.at / place.position.clamp(min=1)
    elif aggregate == "minimum":
        behind = torch.where(place.moved, value, value.clamp(max=0))
    else:
        behind = value.expand_as(place.position)
    return torch.where(place.later, behind, 0.0)


def _clear(value: Tensor, aggregate: str, place: _Place, limits: list[Tensor]) -> Tensor:
    """Move a value away from 0 until no prefix is closer to a bound than the rounding error."""
    for _ in range(8):
        found = _follow(aggregate, value, place)
        if not any(bool(((found - limit).abs() < _CLEAR)[place.later].any()) for limit in limits):
            break
        value = value * 1.07
    return value
