"""Readers of a composed configuration, shared by the checks."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...correction import CorrectionSpec, MaskSpec, SpecError, WeightSpec
from ...correction.bound_text import format_bounds
from ...correction.problem import format_value
from ...extensions.registry import load_extensions
from ...support.support_settings import SupportSettings
from ..old_log_prob import read_correction
from ..verl_keys.keys import list_active, name_part, read_rollout_correction
from ..verl_keys.router_replay import ROUTER_REPLAY, find_router_replay

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
SHADOW = "offpolicy.shadow"
SUPPORT_PART = "support"
_RATIOS = {"rollout": "pi_old / mu", "full": "pi / mu", "ppo": "pi / pi_old"}


@dataclass(frozen=True)
class ConfiguredPart:
    """One part of a configured correction, which gets a verdict of its own.

    Attributes:
        name: as ``Problem.parts`` names it.
        meaning: what is configured, in a few words.
        reads_mu: True if it needs the rollout engine's log-probs.
        ours: True if this recipe corrects the loss by it; False for verl's own parts and for what is only reported.
    """

    name: str
    meaning: str
    reads_mu: bool = True
    ours: bool = True


def copy_config(config: DictConfig) -> DictConfig:
    """Copy a configuration; pickle takes a sixth of the time that ``copy.deepcopy`` takes for verl's."""
    copied: DictConfig = pickle.loads(pickle.dumps(config))
    return copied


def read_spec(config: DictConfig) -> CorrectionSpec:
    """Read and validate the correction of a composed configuration."""
    return CorrectionSpec.from_mapping(read_correction(config))


def read_shadows(config: DictConfig) -> dict[str, CorrectionSpec]:
    """Read the shadow corrections, by name, of a configuration that ``main_offpolicy`` has resolved."""
    node = OmegaConf.select(config, SHADOW)
    mapping: Any = OmegaConf.to_container(node, resolve=True) if node else {}
    if not isinstance(mapping, dict):
        raise SpecError(
            "names of options, which main_offpolicy has not replaced by their values.", key=SHADOW, value=mapping
        )
    return {str(name): CorrectionSpec.from_mapping(values) for name, values in mapping.items()}


def list_parts(config: DictConfig, spec: CorrectionSpec) -> list[ConfiguredPart]:
    """List all configured parts: of our correction, its shadows, verl's own correction, and router replay."""
    parts = [ConfiguredPart(key, _describe_weight(weight)) for key, weight in spec.all_weights.items()]
    parts += [ConfiguredPart(f"masks.{name}", _describe_mask(mask), _reads_mu(mask)) for name, mask in spec.masks]
    if spec.proximal != "recompute":
        parts.append(ConfiguredPart("proximal", f"pi_old: {spec.proximal}", spec.proximal != "reuse"))
    if spec.kl_clip is not None:
        lower, upper = spec.kl_clip
        band = format_bounds({"lower": lower, "upper": upper})
        parts.append(ConfiguredPart("kl_clip", f"KL loss with pi / pi_old in {band}", reads_mu=False))
    if spec.kl_weight is not None:
        ratio, reads_mu = _RATIOS[spec.kl_weight.ratio], spec.kl_weight.ratio == "full"
        capped = "" if spec.kl_weight.upper is None else f", {format_bounds({'upper': spec.kl_weight.upper})}"
        parts.append(ConfiguredPart("kl_weight", f"KL loss times {ratio}{capped}", reads_mu))
    if spec.penalty is not None:
        ratio, reads_mu = _RATIOS[spec.penalty.ratio], spec.penalty.ratio == "full"
        meaning = f"{spec.penalty.coefficient:g} times (log {ratio})^2"
        parts.append(ConfiguredPart("penalty", meaning, reads_mu))
    if spec.nonfinite != "counted":
        parts.append(ConfiguredPart("nonfinite", f"tokens without a finite mu {spec.nonfinite}"))
    if spec.denominator != "original":
        parts.append(ConfiguredPart("denominator", spec.denominator))
    if spec.baseline != "include":
        parts.append(ConfiguredPart("baseline", spec.baseline))
    if (support := SupportSettings.from_config(config)) is not None:
        meaning = f"pi_old and pi over up to {support.size} tokens that could be sampled; else {support.unknown}"
        parts.append(ConfiguredPart(SUPPORT_PART, meaning, ours=False))
    parts += [
        ConfiguredPart(f"shadow.{name}", "reported, not applied", ours=False)
        for name in OmegaConf.select(config, SHADOW) or ()
    ]
    values = read_rollout_correction(config)
    for key in list_active(config):
        bound = values.get(f"{key}_threshold")
        within = f", {key}_threshold={format_value(bound)}" if f"{key}_threshold" in values else ""
        parts.append(ConfiguredPart(name_part(key), f"verl's own, {format_value(values[key])}{within}", ours=False))
    for each in load_extensions(config):
        parts.append(ConfiguredPart(each.section, each.meaning, reads_mu=False, ours=False))
    if asked := find_router_replay(config):
        parts.append(ConfiguredPart(ROUTER_REPLAY, asked, reads_mu=False, ours=False))
    return parts


def needs_mu(config: DictConfig, spec: CorrectionSpec) -> bool:
    """Return True if anything configured needs the rollout engine's log-probs."""
    return not spec.is_none or spec.support is not None or bool(OmegaConf.select(config, SHADOW))


def _reads_mu(mask: MaskSpec) -> bool:
    return mask.ratio != "ppo" and not mask.entry.of_age


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
