"""Trial micro-batches on which the effect of one correction is known, regardless of the actual policies.

Each trial changes mu and pi_old (and also pi for differences of probabilities, or the versions of the weights for ages)
so that some units are just beyond or just inside a bound and all other units are far from that bound. The trial states
the factor by which the correction must multiply each token's gradient. This factor is derived from the bound and the
definition of the aggregate, without using the correction's code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict import NonTensorStack
from torch import Tensor

from ..batch.micro_batch import MicroBatch
from ..batch.padding import with_tensors
from ..batch.plan import SharedPlan
from ..batch.weight_versions import (
    CHUNKS,
    EXTRA_FIELDS,
    NEWEST_VERSION,
    OLDEST_VERSION,
    UNKNOWN,
    VERSIONS,
    Chunk,
    TokenVersions,
)
from ..correction import BatchConstants, MaskSpec, WeightSpec, turns
from .inverses import HIGH, invert_aggregate, place_gap, place_kl

BEYOND = 0.01
"""Distance beyond a bound, in nats: larger than rounding errors, but within the base loss's own clip."""

MEAN_WEIGHT = 2.0
_NEAR = 0.02
"""Step from a bound, as a fraction of the bound in nats; small enough to detect a bound with a wrong factor."""
_LEAST = 1e-4  # nats, larger than the rounding error of float32 log-probs
_ON_RATIO = ("product", "geometric", "any", "exp_abs_mean")
"""Aggregates whose bounds are ratios; they are compared in log space."""
_WIDE_GAP = 0.5
"""Largest difference of probabilities placed on one token if a unit's tokens share a sum of differences."""
_WIDE_KL = 1.0
"""Largest binary KL divergence, in nats, placed on one token."""


@dataclass(frozen=True)
class Trial:
    """A changed micro-batch and the expected gradient factors.

    Attributes:
        label: the bound under test. At least one trial with this label must be conclusive about the bound. Empty for
            none.
        batch: micro-batch with the policy's ``log_prob``, detached.
        factor: (B, T) factor by which the uncorrected gradient of each token's policy term is multiplied.
        constants: batch-level constants, as the trainer would send them.
    """

    label: str
    batch: MicroBatch
    factor: Tensor
    constants: BatchConstants


def build_weight_trials(spec: WeightSpec, batch: MicroBatch) -> Iterator[Trial]:
    """Build trials of a weight: every other unit's raw weight is beyond or inside a bound; all other weights are 1.

    A weight with age-dependent bounds is tested at each age, on the unit of each row's first token. A weight for one
    sign of the advantage is tested with advantages of this sign, of the other sign, and of both signs in one row.
    """
    return _try_each_age(spec, batch, _build_weight_trials)


Part = TypeVar("Part", WeightSpec, MaskSpec)
Builder = Callable[[Part, MicroBatch], Iterator[Trial]]


def _try_each_age(spec: Part, batch: MicroBatch, build: Builder[Part]) -> Iterator[Trial]:
    """Build the trials; age-dependent bounds are tested at each age that has a factor, and at one greater age."""
    if spec.when == "post_tool":
        batch = open_second_turn(batch)
    factors: list[float] = list(spec.by_staleness or ())
    if not factors:
        yield from build(spec, batch)
        return
    for age, factor in enumerate((*factors, factors[-1])):
        scaled: dict[str, Any] = {
            name: None if (bound := getattr(spec, name)) is None else bound**factor for name in ("lower", "upper")
        }
        if isinstance(spec, MaskSpec) and spec.delta is not None:
            scaled["delta"] = spec.delta * factor
        for trial in build(replace(spec, **scaled), age_first_tokens(batch, age)):
            yield replace(trial, label=trial.label and f"{trial.label} at age {age}")


def _build_weight_trials(spec: WeightSpec, batch: MicroBatch) -> Iterator[Trial]:
    demanded = {0.5: 0.5} if spec.lower is None else {2.0: 2.0} if spec.upper is None else {}
    for bound, beyond in ((spec.lower, 0.5), (spec.upper, 2.0)):
        if bound is not None:
            out = 0.0 if spec.kind == "reject" else bound
            demanded |= {beyond * bound: out, math.sqrt(bound): math.sqrt(bound)}
            if spec.by_staleness is not None:
                near = math.exp(math.copysign(max(_NEAR * abs(math.log(bound)), _LEAST), math.log(beyond)))
                demanded |= {bound * near: out, bound / near: bound / near}
    if spec.upper is None:
        demanded[2.0] = 2.0
    if spec.power is not None and spec.rate is not None:
        demanded = {raw: math.exp(spec.rate * (1 - raw)) * raw**spec.power for raw in demanded}
    mean = MEAN_WEIGHT if spec.normalize else 1.0
    constants = BatchConstants(weight_mean=mean)
    units = _number_units(spec.level, batch)
    hit = _choose_units(units, spec.by_staleness is not None, spec)
    # The whole value of each unit is placed on one token, because rounding errors of thousands of tokens would exceed
    # the tolerance.
    first = hit & _find_unit_starts(units, batch.response_mask)
    size = (
        _count_tokens(units, batch.response_mask) if spec.aggregate == "geometric" else torch.ones_like(units).double()
    )
    sign = -1.0 if spec.when == "negative" else 1.0
    same = torch.full_like(size, sign)

    def place(raw: float, advantages: Tensor, weighed: Tensor, weight: float) -> Trial:
        moved = shift_mu(spec, batch, torch.where(first, math.log(raw) * size, 0.0), advantages)
        factor = torch.where(weighed, weight / mean, 1.0 / mean)
        acts = bool((factor != 1).any()) and advantages is same
        return Trial(f"raw {raw:g}" if acts else "", moved, factor, constants)

    for raw, weight in demanded.items():
        if spec.when == "post_tool":
            yield place(raw, same, hit & (turns(batch.response_mask) > 0), weight)
            continue
        yield place(raw, same, hit, weight)
        if spec.when != "any":
            yield place(raw, -same, torch.zeros_like(hit), weight)
            mixed = mix_signs(batch.response_mask, sign)
            yield place(raw, mixed, hit if spec.sign == "row" else hit & (mixed * sign > 0), weight)


def build_mask_trials(name: str, spec: MaskSpec, batch: MicroBatch) -> Iterator[Trial]:
    """Build trials of a mask: every other unit is beyond each bound, or inside it, for advantages of either sign.

    A mask on age, or with age-dependent bounds, is tested on the unit of each row's first token; only this token has an
    age.
    """
    return _try_each_age(spec, batch, partial(_build_mask_trials, name))


def _build_mask_trials(name: str, spec: MaskSpec, batch: MicroBatch) -> Iterator[Trial]:
    # A budget's cutoff depends on the batch, so the trial sets the cutoff that ``list_bounds`` yields.
    constants = BatchConstants(cutoffs={name: 0.04} if spec.budget is not None else {})
    signs = {"negative": (-1.0,), "positive": (1.0,)}.get(spec.when, (-1.0, 1.0))
    mask = batch.response_mask

    def build(side: float, value: float, sign: float, *, beyond: bool, inward: bool = False) -> Trial:
        advantages = torch.full_like(batch.log_prob, sign, dtype=torch.float64)
        moved, hit = _place_policies(spec, batch, value, side, advantages, inward=inward)
        if spec.when == "post_tool":
            hit = hit & (turns(mask) > 0)
        factor = torch.where(hit, 0.0, 1.0) if beyond else torch.ones_like(hit, dtype=torch.float64)
        return Trial(f"side {side:+.0f}" if beyond and not inward else "", moved, factor, constants)

    for side, bound in list_bounds(spec):
        there, inside = (_step_from_bound(spec, bound, side, beyond) for beyond in (True, False))
        for sign in signs:
            yield build(side, there, sign, beyond=True)
            yield build(side, inside, sign, beyond=False)
        if spec.when in ("negative", "positive"):
            yield build(side, there, -signs[0], beyond=False)
        if spec.when == "outward":
            # If the log-ratio may have either sign, the sign is chosen such that the update reduces the log-ratio.
            yield from (build(side, there, sign, beyond=True, inward=True) for sign in signs)
        if spec.when not in ("any", "post_tool"):
            # The mean advantage of the rows has the mask's sign, and later tokens have the opposite sign.
            advantages = mix_signs(mask, signs[0])
            moved, hit = _place_policies(spec, batch, there, side, advantages)
            by_row = spec.sign == "row" or spec.when == "outward"  # ``hit`` already includes when=outward
            looked_at = hit if by_row else hit & (advantages * signs[0] > 0)
            yield Trial("", moved, torch.where(looked_at, 0.0, 1.0), constants)


def list_bounds(spec: MaskSpec) -> Iterator[tuple[float, float]]:
    """Yield (side, bound) for each bound; side is -1 (lower) or +1 (upper), and bounds on ratios are log-ratios."""
    if spec.delta is not None:
        yield -1.0, -spec.delta
    elif spec.budget is not None:
        yield 1.0, 0.04
    else:
        on_ratio = spec.aggregate in _ON_RATIO
        for side, bound in ((-1.0, spec.lower), (1.0, spec.upper)):
            if bound is not None:
                yield side, math.log(bound) if on_ratio else bound


def _step_from_bound(spec: MaskSpec, bound: float, side: float, beyond: bool) -> float:
    if spec.aggregate == "staleness":
        return bound + 1 if beyond else bound
    if spec.by_staleness is not None:
        return bound + (side if beyond else -side) * max(_NEAR * abs(bound), _LEAST)
    if not beyond:
        return bound / 2
    # Differences of probabilities and squares of small ratios need a smaller step than bounds in nats do.
    return bound + side * measure_step(spec, bound)


def measure_step(spec: MaskSpec, bound: float) -> float:
    """Compute the step beyond a bound, in the bound's unit; at most half the remaining range for a probability gap."""
    if spec.aggregate in _ON_RATIO:
        return BEYOND
    step = min(BEYOND, 0.1 * abs(bound) + 1e-4)
    return min(step, (1 - abs(bound)) / 2) if spec.aggregate == "binary_tv" else step


def mix_signs(mask: Tensor, sign: float) -> Tensor:
    """Build advantages of rows whose mean has ``sign`` and whose tokens after the first have the opposite sign."""
    first = mask & (mask.cumsum(-1) == 1)
    count = mask.sum(-1, keepdim=True).double()
    return torch.where(first, sign * (count + 1), -sign)


def _place_policies(
    spec: MaskSpec, batch: MicroBatch, value: float, side: float, advantages: Tensor, *, inward: bool = False
) -> tuple[MicroBatch, Tensor]:
    """Build policies whose aggregate is ``value`` on every other unit and neutral elsewhere; also flag these units.

    The whole log-ratio of a unit is placed on its first token, because PPO's clip then keeps the gradient of the other
    tokens. In these units, ``when=outward`` flags only tokens whose log-ratio and advantage have the same sign.
    """
    mask = batch.response_mask
    if spec.aggregate == "staleness":
        same = batch.log_prob.double()
        moved = replace_policies(age_first_tokens(batch, int(value)), old=same, mu=same, advantages=advantages)
        return moved, _choose_units(_number_units(spec.level, moved), True, spec) & mask
    units = _number_units(spec.level, batch)
    hit = _choose_units(units, spec.by_staleness is not None, spec) & mask
    # The maximum can be low only if all values are low.
    first = hit if spec.aggregate == "k1_max" else hit & _find_unit_starts(units, mask)
    looked = look_at(spec, mask, advantages)
    # PPO never clips upward moves with a negative advantage, or downward moves with a positive advantage.
    free = -advantages.sign()
    way = free if spec.when != "outward" else -looked if inward else looked
    if spec.aggregate.startswith("binary_"):
        masses = _spread_gap(spec, units, mask, hit, value, way)
        if spec.when == "outward":
            hit = hit & ((masses[0] - masses[1]) * looked > 0)
        return place_masses(spec, batch, *masses, advantages), hit
    size = (
        _count_tokens(units, mask)
        if spec.aggregate.endswith(("mean", "geometric"))
        else torch.ones_like(units).double()
    )
    total = math.expm1(value) * size if spec.aggregate == "exp_abs_mean" else value * size
    shift = torch.zeros_like(total)
    shift[first] = invert_aggregate(spec.aggregate, total[first], side, way[first])
    if spec.when == "outward":
        hit = hit & (shift * looked > 0)
        # The drift pi / pi_old is so large that a mask with the wrong ratio would decide differently beyond or inside a
        # bound.
    drift = free * 1.5 * shift.abs()
    # A single-token unit must keep its gradient, within PPO's second clip of large ratios.
    drift = torch.where(_count_tokens(units, mask) == 1, drift.clamp(-0.5, 0.5), drift)
    return shift_ratio(spec, batch, shift, drift, advantages), hit


def _spread_gap(
    spec: MaskSpec, units: Tensor, mask: Tensor, hit: Tensor, value: float, way: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose both policies' probabilities of each token, (B, T) each, equal except on the first token of tested
    units."""
    size = _count_tokens(units, mask)
    total = value * size if spec.aggregate.endswith("_mean") else torch.full_like(size, value)
    if "kl" in spec.aggregate:
        count = torch.minimum((total / _WIDE_KL).ceil().clamp(min=1), size)
        return place_kl(spec.aggregate, hit & (_count_before(units, mask) < count), total / count, way)
    # The whole sum is placed on a single-token unit. A sum larger than a probability is spread over the fewest tokens.
    count = torch.ones_like(size) if spec.aggregate == "binary_tv" else (total.abs() / _WIDE_GAP).ceil().clamp(min=1)
    count = torch.minimum(count, size)
    return place_gap(hit & (_count_before(units, mask) < count), total / count)


def place_masses(
    spec: MaskSpec, batch: MicroBatch, numerator: Tensor, denominator: Tensor, advantages: Tensor
) -> MicroBatch:
    """Assign these probabilities to the two policies of the ratio; the third policy equals one of these two."""
    top, bottom, level = numerator.log(), denominator.log(), torch.full_like(numerator, math.log(HIGH))
    pi = top if spec.ratio != "rollout" else level
    old = {"rollout": top, "full": pi, "ppo": bottom}[spec.ratio]
    mu = bottom if spec.ratio != "ppo" else old
    return replace_policies(replace(batch, log_prob=pi.to(batch.log_prob.dtype)), old=old, mu=mu, advantages=advantages)


def shift_mu(spec: WeightSpec, batch: MicroBatch, shift: Tensor, advantages: Tensor) -> MicroBatch:
    """Set the log of the weight's ratio to ``shift``."""
    # pi_old differs from pi, so the trial detects a mix-up of the two. The base loss never clips a ratio pi /
    # pi_old below 1 with a positive advantage, or above 1 with a negative advantage, so every token has a gradient to
    # weigh.
    old = batch.log_prob.double() + advantages.sign() * BEYOND
    numerator = old if spec.ratio == "rollout" else batch.log_prob.double()
    return replace_policies(batch, old=old, mu=numerator - shift, advantages=advantages)


def shift_ratio(spec: MaskSpec, batch: MicroBatch, shift: Tensor, drift: Tensor, advantages: Tensor) -> MicroBatch:
    """Set the log of the mask's ratio to ``shift``, and log(pi / pi_old), if not yet fixed, to ``drift``."""
    ppo, rollout = {"rollout": (drift, shift), "full": (drift, shift - drift), "ppo": (shift, -1.5 * shift)}[spec.ratio]
    old = batch.log_prob.double() - ppo
    return replace_policies(batch, old=old, mu=old - rollout, advantages=advantages)


def look_at(spec: MaskSpec, mask: Tensor, advantages: Tensor) -> Tensor:
    """Return the sign of the advantage that the mask reads: the advantage of the token, or the mean over its row."""
    if spec.sign != "row":
        return advantages.sign()
    return torch.where(mask, advantages, 0.0).sum(-1, keepdim=True).sign().expand_as(advantages)


def replace_policies(batch: MicroBatch, *, old: Tensor, mu: Tensor, advantages: Tensor) -> MicroBatch:
    return replace(
        batch,
        old_log_prob=old.float(),
        rollout_log_prob=mu.float(),
        advantages=advantages.to(batch.advantages.dtype),
        scale=None,
    )


def age_first_tokens(batch: MicroBatch, age: int) -> MicroBatch:
    """Mark the first response token of each row as sampled by older weights, and the rest by the current weights.

    The versions are recorded per turn, as the rollout servers' client does.

    Args:
        age: age of the first tokens, in versions.
    """
    mask, step = batch.response_mask, age + 2
    old, fresh = step - 1 - age, step - 1
    fields = []
    for runs in _measure_runs(mask):
        turns_of_row: list[list[Chunk]] = [[(fresh, tokens)] for tokens in runs]
        if runs:
            turns_of_row[0] = [(old, 1), (fresh, runs[0] - 1)] if runs[0] > 1 else [(old, 1)]
        fields.append({OLDEST_VERSION: old, NEWEST_VERSION: fresh, CHUNKS: turns_of_row})
    tokens = torch.where(mask & (mask.cumsum(-1) == 1), old, torch.where(mask, fresh, UNKNOWN))
    oldest, newest = (torch.full((len(mask),), version, dtype=torch.int64) for version in (old, fresh))
    return replace(
        batch,
        plan=SharedPlan(step),
        versions=TokenVersions(oldest, newest, tokens),
        data=with_tensors(batch.data, **{VERSIONS: None, EXTRA_FIELDS: NonTensorStack(*fields)}),
    )


def _measure_runs(mask: Tensor) -> Iterator[list[int]]:
    """Yield the lengths of each row's runs of response tokens."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    run = starts.flatten().cumsum(0) - 1
    lengths = iter(run[mask.flatten()].bincount().tolist())
    for runs in starts.sum(-1).tolist():
        yield list(itertools.islice(lengths, runs))


def open_second_turn(batch: MicroBatch) -> MicroBatch:
    """Turn the second response token of each row into a tool token, so that the tokens after it form a second turn."""
    mask = batch.response_mask
    return replace(batch, response_mask=mask & (mask.cumsum(-1) != 2))


def _choose_units(units: Tensor, aged: bool, spec: MaskSpec | WeightSpec) -> Tensor:
    """Choose the units on which a trial acts: every other unit or, with ``aged``, each row's first unit.

    If the part applies only after a tool result, the turns after the result are chosen.
    """
    later = spec.when == "post_tool" and spec.level == "turn"
    return units == 0 if aged else units % 2 == int(later)


def _number_units(level: str, batch: MicroBatch) -> Tensor:
    """Number the unit of each response token, from 0 in each row: (B, T) int64."""
    mask = batch.response_mask
    if level == "token":
        return (mask.cumsum(-1) - 1).clamp(min=0)
    if level == "turn":
        return turns(mask)
    numbers = torch.zeros_like(mask, dtype=torch.int64)
    if level == "version" and isinstance(batch.versions, TokenVersions):
        # Versions never decrease within a row.
        seen = torch.where(mask, batch.versions.tokens, torch.iinfo(torch.int64).min).cummax(-1).values
        numbers[:, 1:] = (seen[:, 1:] != seen[:, :-1]).cumsum(-1)
        numbers = (numbers - (~mask[:, :1]).long()).clamp(min=0)
    return numbers


def _find_unit_starts(units: Tensor, mask: Tensor) -> Tensor:
    """Find the first token of each unit: (B, T) bool."""
    before = torch.full_like(units, -1)
    before[:, 1:] = torch.where(mask, units, -1).cummax(-1).values[:, :-1]
    return mask & (units > before)


def _count_before(units: Tensor, mask: Tensor) -> Tensor:
    """Count the tokens of a unit before each token: (B, T) int64."""
    count = mask.cumsum(-1)
    first = torch.where(_find_unit_starts(units, mask), count, 0).cummax(-1).values
    return count - first


def _count_tokens(units: Tensor, mask: Tensor) -> Tensor:
    """Count the tokens of each token's unit, at least 1: (B, T) float64."""
    counts = torch.zeros(units.shape, dtype=torch.float64, device=units.device)
    counts.scatter_add_(1, units, mask.double())
    return counts.gather(1, units).clamp(min=1)
