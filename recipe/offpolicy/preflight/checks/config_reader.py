"""What the checks read of a composed configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...correction import CorrectionSpec, MaskSpec, SpecError, WeightSpec
from ...correction.problem import format_value
from ...extensions.registry import load_extensions
from ..old_log_prob import correction_of
from ..old_log_prob import gradient_steps as gradient_steps
from ..verl_keys.keys import active, own, part
from ..verl_keys.router_replay import ROUTER_REPLAY, asked_for

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
SHADOW = "offpolicy.shadow"


@dataclass(frozen=True)
class Part:
    """One thing that a configuration asks for, whose verdict is told by itself.

    Attributes:
        name: as ``Problem.parts`` names it.
        meaning: what is asked for, in a few words.
        reads_mu: whether it needs the rollout engine's log-probs.
        ours: whether it corrects the loss by this recipe: verl's own parts and what is only reported do not.
    """

    name: str
    meaning: str
    reads_mu: bool = True
    ours: bool = True


def spec_of(config: DictConfig) -> CorrectionSpec:
    """The validated correction of a composed configuration."""
    return CorrectionSpec.from_mapping(correction_of(config))


def shadows_of(config: DictConfig) -> dict[str, CorrectionSpec]:
    """Corrections that are reported and not applied, by name, of a configuration that main has prepared."""
    node = OmegaConf.select(config, SHADOW)
    mapping: Any = OmegaConf.to_container(node, resolve=True) if node else {}
    if not isinstance(mapping, dict):
        raise SpecError("names, that main_offpolicy has not replaced by what they mean.", key=SHADOW, value=mapping)
    return {str(name): CorrectionSpec.from_mapping(values) for name, values in mapping.items()}


def parts_of(config: DictConfig, spec: CorrectionSpec) -> list[Part]:
    """Everything that is asked for: of ours, its shadows, extensions, verl's own, and router replay."""
    parts = []
    if spec.weight is not None:
        parts.append(Part("weight", _weight(spec.weight)))
    parts += [Part(f"masks.{name}", _mask(mask), mask.ratio != "ppo") for name, mask in spec.masks]
    if spec.proximal != "recompute":
        parts.append(Part("proximal", f"pi_old: {spec.proximal}", spec.proximal != "reuse"))
    if spec.kl_clip is not None:
        parts.append(Part("kl_clip", f"KL loss with pi / pi_old in {_band(*spec.kl_clip)}", reads_mu=False))
    if spec.denominator != "original":
        parts.append(Part("denominator", spec.denominator))
    if spec.baseline != "include":
        parts.append(Part("baseline", spec.baseline))
    parts += [
        Part(f"shadow.{name}", "reported, not applied", ours=False) for name in OmegaConf.select(config, SHADOW) or ()
    ]
    parts += [Part(each.section, each.meaning, reads_mu=False, ours=False) for each in load_extensions(config)]
    values = own(config)
    for key in active(config):
        bound = values.get(f"{key}_threshold")
        within = f", {key}_threshold={format_value(bound)}" if f"{key}_threshold" in values else ""
        parts.append(Part(part(key), f"verl's own, {format_value(values[key])}{within}", ours=False))
    if asked := asked_for(config):
        parts.append(Part(ROUTER_REPLAY, asked, reads_mu=False, ours=False))
    return parts


def looks_at_mu(config: DictConfig, spec: CorrectionSpec) -> bool:
    """Whether anything that is asked for needs the rollout engine's log-probs."""
    return not spec.is_none or bool(OmegaConf.select(config, SHADOW))


def _weight(weight: WeightSpec) -> str:
    ratio = {"rollout": "pi_old / mu", "full": "pi / mu"}[weight.ratio]
    return f"{weight.level}, {weight.kind} {_band(weight.lower, weight.upper)} on {ratio}"


def _mask(mask: MaskSpec) -> str:
    ratio = {"rollout": "pi_old / mu", "full": "pi / mu", "ppo": "pi / pi_old"}[mask.ratio]
    bounds = f"budget {mask.budget:g}" if mask.budget is not None else _band(mask.lower, mask.upper)
    return f"{mask.level}, {mask.aggregate} {bounds} on {ratio}" + ("" if mask.when == "any" else f", {mask.when}")


def _band(lower: float | None, upper: float | None) -> str:
    return f"[{'' if lower is None else f'{lower:g}'}, {'' if upper is None else f'{upper:g}'}]"
