"""The parts of a configured correction, each in a few words; the doctor gives a verdict on each."""

from __future__ import annotations

from dataclasses import dataclass

from ..correction import MaskSpec, WeightSpec
from ..correction.bounds import format_bounds
from ..correction.problem import format_value
from .composed import REPLAY_PART, SHADOW, SUPPORT_PART, Composed, name_part

_RATIOS = {"rollout": "pi_old / mu", "full": "pi / mu", "ppo": "pi / pi_old"}


@dataclass(frozen=True)
class ConfiguredPart:
    """One part of a configured correction, with its own verdict.

    Attributes:
        name: as ``Problem.parts`` names it.
        meaning: what is configured, in a few words.
        reads_mu: True if it needs the rollout engine's log-probs.
        ours: True if this recipe's correction uses it; False for shadows, extensions and verl's own parts.
    """

    name: str
    meaning: str
    reads_mu: bool = True
    ours: bool = True


def list_parts(run: Composed) -> list[ConfiguredPart]:
    """List all configured parts: of our correction, its shadows, verl's own correction, and router replay."""
    spec = run.spec
    parts = [ConfiguredPart(key, describe_part(weight)) for key, weight in spec.all_weights.items()]
    parts += [ConfiguredPart(f"masks.{name}", describe_part(mask), _reads_mu(mask)) for name, mask in spec.masks]
    if spec.proximal != "recompute":
        parts.append(ConfiguredPart("proximal", f"pi_old: {spec.proximal}", spec.proximal != "reuse"))
    if spec.kl_clip is not None:
        band = format_bounds(dict(zip(("lower", "upper"), spec.kl_clip, strict=True)))
        parts.append(ConfiguredPart("kl_clip", f"KL loss with pi / pi_old in {band}", reads_mu=False))
    if spec.kl_weight is not None:
        capped = "" if spec.kl_weight.upper is None else f", {format_bounds({'upper': spec.kl_weight.upper})}"
        meaning = f"KL loss times {_RATIOS[spec.kl_weight.ratio]}{capped}"
        parts.append(ConfiguredPart("kl_weight", meaning, spec.kl_weight.ratio == "full"))
    if spec.penalty is not None:
        meaning = f"{spec.penalty.coefficient:g} times (log {_RATIOS[spec.penalty.ratio]})^2"
        parts.append(ConfiguredPart("penalty", meaning, spec.penalty.ratio == "full"))
    if spec.centering is not None:
        parts.append(ConfiguredPart("centering", f"expected score over the {spec.centering} likeliest tokens removed"))
    if spec.nonfinite != "counted":
        parts.append(ConfiguredPart("nonfinite", f"tokens without a finite mu {spec.nonfinite}"))
    if spec.denominator != "original":
        parts.append(ConfiguredPart("denominator", spec.denominator))
    if spec.baseline != "include":
        parts.append(ConfiguredPart("baseline", spec.baseline))
    if (support := run.support) is not None:
        meaning = f"pi_old and pi over up to {support.size} tokens that could be sampled; else {support.unknown}"
        parts.append(ConfiguredPart(SUPPORT_PART, meaning, ours=False))
    shadows = run.get(SHADOW) or ()
    parts += [ConfiguredPart(f"shadow.{name}", "reported, not applied", ours=False) for name in shadows]
    for key in run.active:
        bound = f"{key}_threshold"
        within = f", {bound}={format_value(run.verls[bound])}" if bound in run.verls else ""
        parts.append(ConfiguredPart(name_part(key), f"verl's own, {format_value(run.verls[key])}{within}", ours=False))
    for each in run.extensions:
        parts.append(ConfiguredPart(each.section, each.meaning, reads_mu=False, ours=False))
    if asked := run.router_replay:
        parts.append(ConfiguredPart(REPLAY_PART, asked, reads_mu=False, ours=False))
    return parts


def _reads_mu(mask: MaskSpec) -> bool:
    return mask.ratio != "ppo" and not mask.entry.of_age


def describe_part(part: WeightSpec | MaskSpec) -> str:
    """Describe a weight or a mask in a few words."""
    return _describe_weight(part) if isinstance(part, WeightSpec) else _describe_mask(part)


def _describe_weight(weight: WeightSpec) -> str:
    ratio = _RATIOS[weight.ratio]
    bounds = format_bounds({"lower": weight.lower, "upper": weight.upper})
    when = "" if weight.when == "any" else f", {weight.when}"
    aggregate = "" if weight.aggregate == "product" else f" {weight.aggregate},"
    if weight.kind == "gamma":
        bounds = f"power={weight.power:g} rate={weight.rate:g}"
    return f"{weight.level},{aggregate} {weight.kind} {bounds} on {ratio}{when}{_format_factors(weight)}"


def _describe_mask(mask: MaskSpec) -> str:
    when = "" if mask.when == "any" else f", {mask.when}"
    if mask.entry.of_age:
        return f"{mask.level}, at most {mask.upper:g} versions old{when}"
    ratio = _RATIOS[mask.ratio]
    bounds = format_bounds({name: getattr(mask, name) for name in ("lower", "upper", "delta", "budget")})
    return f"{mask.level}, {mask.aggregate} {bounds} on {ratio}{when}{_format_factors(mask)}"


def _format_factors(part: WeightSpec | MaskSpec) -> str:
    if part.by_position is not None:
        return f", |log bound| times position^{part.by_position:g}"
    return "" if part.by_staleness is None else f", |log bound| times {format_value(list(part.by_staleness))} by age"
