"""Checks of bounds, ratios and aggregates that cannot be meant."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omegaconf import DictConfig

from ...correction import CorrectionSpec, MaskSpec
from ...correction.bound_limits import compute_arithmetic_limit, compute_proposal_limit
from ...correction.problem import Problem, format_value, set_to
from ...correction.ratios import EXP_CLAMP
from ...correction.validation import get_usual_bounds


def check_bounds_hold_agreement(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that no band excludes the value of equal policies."""
    banded = [(f"masks.{name}", mask.lower, mask.upper, 1 if mask.entry.on_ratio else 0) for name, mask in spec.masks]
    banded += [(key, weight.lower, weight.upper, 1) for key, weight in spec.all_weights.items()]
    for part, lower, upper, neutral in banded:
        key = f"correction.{part}"
        reason = f"the bounds leave out {neutral}, the value for policies that agree, where nothing is to be corrected."
        for side, bound, sign in (("lower", lower, "<="), ("upper", upper, ">=")):
            if bound is not None and (bound > neutral if side == "lower" else bound < neutral):
                at = f"{key}.{side}"
                fix, overrides = f"Set {at} {sign} {neutral}.", (set_to(at, neutral),)
                yield Problem(at, bound, reason, fix, parts=(part,), overrides=overrides)


def check_bounds_in_reach(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that bounds can be passed, as log-ratios are clamped, and hold more than bit-exact agreement."""
    for name, mask in spec.masks:
        yield from _find_unreachable(f"correction.masks.{name}", name, mask)
        yield from _find_closed(f"correction.masks.{name}", name, mask)
    for part, weight in spec.all_weights.items():
        if weight.kind != "reject" and weight.lower == weight.upper == 1:
            key = f"correction.{part}.upper"
            reason = "between 1 and 1 every weight is 1, and nothing is corrected."
            yield Problem(key, 1.0, reason, parts=(part,), overrides=(set_to(key, 2.0),))


def warn_bounds_never_seen(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of bounds so far out that no run was seen to reach them."""
    for name, mask in spec.masks:
        for bound, value, distance in _measure_distances(mask):
            if compute_proposal_limit(mask) < distance <= compute_arithmetic_limit(mask):
                key = f"correction.masks.{name}.{bound}"
                usual = _get_usual(mask, bound)
                reason = (
                    f"beyond what any run with two related policies reaches: it would never act. "
                    f"Usual: {format_value(usual)}."
                )
                yield Problem(key, value, reason, "", "NO-OP", (f"masks.{name}",), (set_to(key, usual),))


def _find_unreachable(key: str, name: str, mask: MaskSpec) -> Iterator[Problem]:
    for bound, value, distance in _measure_distances(mask):
        if distance > compute_arithmetic_limit(mask):
            usual = _get_usual(mask, bound)
            reason = (
                f"log-ratios are clamped to +-{EXP_CLAMP:g} nats, a ratio of {math.exp(EXP_CLAMP):.3g}: this bound can "
                f"never act."
            )
            open_side = ", or null where the other side is bound" if bound in ("lower", "upper") else ""
            at = f"{key}.{bound}"
            fix = f"Set {at}={format_value(usual)}, which is in use{open_side}."
            yield Problem(at, value, reason, fix, "ERROR", (f"masks.{name}",), (set_to(at, usual),))


def _find_closed(key: str, name: str, mask: MaskSpec) -> Iterator[Problem]:
    """Find a band without width, which rejects every policy that differs at all."""
    neutral = 1.0 if mask.entry.on_ratio else 0.0
    one_sided = mask.entry.one_sided
    if mask.entry.of_age or mask.upper != neutral or (mask.lower != neutral and not one_sided):
        return
    reason = f"it keeps exactly {neutral:g} alone, two policies that agree to the bit, and rejects everything else."
    bounds = ("upper",) if one_sided else ("lower", "upper")
    mends = tuple(set_to(f"{key}.{bound}", _get_usual(mask, bound)) for bound in bounds)
    yield Problem(f"{key}.upper", mask.upper, reason, "", "ERROR", (f"masks.{name}",), mends)


def _measure_distances(mask: MaskSpec) -> Iterator[tuple[str, float, float]]:
    """Measure the distance of each configured bound from agreement, in the unit that the mask compares.

    Of bounds that go by age, the least over the ages.
    """
    least = min(mask.by_staleness or (1.0,))
    if mask.delta is not None:
        yield "delta", mask.delta, least * mask.delta
    elif mask.budget is not None:
        yield "budget", mask.budget, mask.budget
    else:
        for bound in ("lower", "upper"):
            value = getattr(mask, bound)
            if value is not None:
                yield bound, value, least * abs(math.log(value)) if mask.entry.on_ratio else abs(value)


def _get_usual(mask: MaskSpec, bound: str) -> float | None:
    """Return the usual value of a bound."""
    if bound in ("delta", "budget"):
        return {"delta": 0.1, "budget": 0.04}[bound]
    return get_usual_bounds(mask.aggregate)[bound == "upper"]


def check_weight_ratio(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that no weight on pi / mu stands beside a loss with a ratio to pi of its own."""
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    for part, weight in spec.all_weights.items():
        if weight.ratio == "full" and mode != "gpg":
            key = f"correction.{part}.ratio"
            reason = f"loss_mode {mode} has a ratio to the current policy of its own, which would count twice."
            fix = f"Set actor_rollout_ref.actor.policy_loss.loss_mode=gpg, or {key}=rollout."
            yield Problem(key, "full", reason, fix, parts=(part,))


def check_skyrl_compat(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that skyrl_compat has masks; without them it has no effect."""
    if spec.skyrl_compat and not spec.masks:
        reason, fix = "without a mask there is no order.", "Stack a mask, or set correction.skyrl_compat=false."
        yield Problem("correction.skyrl_compat", True, reason, fix, "NO-OP", ("skyrl_compat",))


def check_token_aggregates(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that level=token has no aggregate: over one token mean, maximum and sum are the same."""
    reason = "level=token decides by single tokens, over which there is nothing to aggregate."
    for part, weight in spec.all_weights.items():
        if weight.level == "token" and weight.aggregate != "product":
            key = f"correction.{part}.aggregate"
            yield Problem(key, weight.aggregate, reason, parts=(part,), overrides=(set_to(key, "product"),))
    for name, mask in spec.masks:
        instead = mask.entry.single
        if mask.level == "token" and instead:
            key = f"correction.masks.{name}.aggregate"
            yield Problem(key, mask.aggregate, reason, parts=(f"masks.{name}",), overrides=(set_to(key, instead),))
