"""Bounds, ratios and orders of a correction that cannot be meant."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omegaconf import DictConfig

from ...correction import CorrectionSpec, MaskSpec
from ...correction.bound_limits import compute_arithmetic_limit, compute_proposal_limit
from ...correction.mask_spec import ON_RATIO
from ...correction.problem import Problem, format_value, set_to
from ...correction.ratios import EXP_CLAMP
from ...correction.validation import band
from .config_reader import ACTOR


def bounds_without_agreement(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Bands that reject policies which agree."""
    banded = [
        (f"masks.{name}", mask.lower, mask.upper, 1 if mask.aggregate in ON_RATIO else 0) for name, mask in spec.masks
    ]
    if spec.weight is not None:
        banded.append(("weight", spec.weight.lower, spec.weight.upper, 1))
    for part, lower, upper, neutral in banded:
        key = f"correction.{part}"
        reason = f"the bounds leave out {neutral}, the value for policies that agree, where nothing is to be corrected."
        if lower is not None and lower > neutral:
            fix = f"Set {key}.lower <= {neutral}."
            yield Problem(
                f"{key}.lower", lower, reason, fix, parts=(part,), overrides=(set_to(f"{key}.lower", neutral),)
            )
        if upper is not None and upper < neutral:
            fix = f"Set {key}.upper >= {neutral}."
            yield Problem(
                f"{key}.upper", upper, reason, fix, parts=(part,), overrides=(set_to(f"{key}.upper", neutral),)
            )


def bounds_out_of_reach(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Bounds that no value can pass, because log-ratios are clamped, and bands that hold agreement to the bit alone."""
    for name, mask in spec.masks:
        yield from _unreachable(f"correction.masks.{name}", name, mask)
        yield from _closed(f"correction.masks.{name}", name, mask)
    weight = spec.weight
    if weight is not None and weight.kind != "reject" and weight.lower == weight.upper == 1:
        key = "correction.weight.upper"
        reason = "between 1 and 1 every weight is 1, and nothing is corrected."
        yield Problem(key, 1.0, reason, parts=("weight",), overrides=(set_to(key, 2.0),))


def bounds_never_seen(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Bounds so far out that no run was seen to reach them."""
    for name, mask in spec.masks:
        for bound, value, distance in _distances(mask):
            if compute_proposal_limit(mask) < distance <= compute_arithmetic_limit(mask):
                key = f"correction.masks.{name}.{bound}"
                usual = _usual(mask, bound)
                reason = (
                    f"so far out that no run with two policies that have to do with one another gets there: it would "
                    f"never act. In use: {format_value(usual)}."
                )
                yield Problem(key, value, reason, "", "INERT", (f"masks.{name}",), (set_to(key, usual),))


def _unreachable(key: str, name: str, mask: MaskSpec) -> Iterator[Problem]:
    for bound, value, distance in _distances(mask):
        if distance > compute_arithmetic_limit(mask):
            usual = _usual(mask, bound)
            reason = (
                f"log-ratios are clamped to +-{EXP_CLAMP:g} nats, a ratio of {math.exp(EXP_CLAMP):.3g}: this bound can "
                f"never act."
            )
            open_side = ", or null where the other side is bound" if bound in ("lower", "upper") else ""
            fix = f"Set {key}.{bound}={format_value(usual)}, which is in use{open_side}."
            yield Problem(
                f"{key}.{bound}", value, reason, fix, "WRONG", (f"masks.{name}",), (set_to(f"{key}.{bound}", usual),)
            )


def _closed(key: str, name: str, mask: MaskSpec) -> Iterator[Problem]:
    """A band without width: whatever differs at all is rejected."""
    neutral = 1.0 if mask.aggregate in ON_RATIO else 0.0
    one_sided = mask.aggregate.startswith(("k2", "k3", "tv"))
    if mask.upper != neutral or (mask.lower != neutral and not one_sided):
        return
    reason = f"it keeps exactly {neutral:g} alone, two policies that agree to the bit, and rejects everything else."
    bounds = ("upper",) if one_sided else ("lower", "upper")
    mends = tuple(set_to(f"{key}.{bound}", _usual(mask, bound)) for bound in bounds)
    yield Problem(f"{key}.upper", mask.upper, reason, "", "WRONG", (f"masks.{name}",), mends)


def _distances(mask: MaskSpec) -> Iterator[tuple[str, float, float]]:
    """Bounds as they are configured, with their distance from agreement in what the mask compares."""
    if mask.delta is not None:
        yield "delta", mask.delta, mask.delta
    elif mask.budget is not None:
        yield "budget", mask.budget, mask.budget
    else:
        for bound in ("lower", "upper"):
            value = getattr(mask, bound)
            if value is not None:
                yield bound, value, abs(math.log(value)) if mask.aggregate in ON_RATIO else abs(value)


def _usual(mask: MaskSpec, bound: str) -> float | None:
    """The value in use for a bound."""
    if bound in ("delta", "budget"):
        return {"delta": 0.1, "budget": 0.04}[bound]
    return band(mask.aggregate)[bound == "upper"]


def weight_beside_the_loss(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """A weight on pi / mu beside a loss with a ratio to pi of its own."""
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if spec.weight is not None and spec.weight.ratio == "full" and mode != "gpg":
        yield Problem(
            "correction.weight.ratio",
            "full",
            f"loss_mode {mode} has a ratio to the current policy of its own, which would count twice.",
            "Set actor_rollout_ref.actor.policy_loss.loss_mode=gpg, or correction.weight.ratio=rollout.",
            parts=("weight",),
            overrides=(set_to(f"{ACTOR}.policy_loss.loss_mode", "gpg"),),
        )


def order_of_skyrl(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """skyrl_compat without masks, where it has no effect."""
    if spec.skyrl_compat and not spec.masks:
        reason, fix = "without a mask there is no order.", "Set correction.skyrl_compat=false."
        override = set_to("correction.skyrl_compat", False)
        yield Problem("correction.skyrl_compat", True, reason, fix, "INERT", ("skyrl_compat",), (override,))


def aggregate_of_single_tokens(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Aggregates over single tokens, where the mean, the greatest and the sum are one."""
    reason = "level=token decides by single tokens, over which there is nothing to aggregate."
    if spec.weight is not None and spec.weight.level == "token" and spec.weight.aggregate != "product":
        key = "correction.weight.aggregate"
        yield Problem(key, spec.weight.aggregate, reason, parts=("weight",), overrides=(set_to(key, "product"),))
    for name, mask in spec.masks:
        measure, _, reduction = mask.aggregate.partition("_")
        instead = (
            "product" if mask.aggregate == "geometric" else f"{measure}_sum" if reduction in ("mean", "max") else ""
        )
        if mask.level == "token" and instead:
            key = f"correction.masks.{name}.aggregate"
            yield Problem(key, mask.aggregate, reason, parts=(f"masks.{name}",), overrides=(set_to(key, instead),))
