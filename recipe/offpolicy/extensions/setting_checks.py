"""The section of an extension: its keys, and its values merged over those of the option that ships them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..batch.declared_keys import Key, Rule, Section
from ..correction import Problem
from ..correction.denominator import GROUP_ESTIMATORS
from ..correction.problem import EVERYTHING, CheckError, Requirement, set_to

REUSED = ("reuse", "bypass", "loglinear", "same_engine")
"""Values of ``correction.proximal`` with which no forward pass computes pi_old before the update."""
OWN_ESTIMATE = (
    Requirement("algorithm.adv_estimator", GROUP_ESTIMATORS, "it makes no advantage of a group's rewards alone."),
    Requirement("algorithm.use_kl_in_reward", (False,), "the KL is part of verl's rewards, but not of these."),
    Requirement("length_penalty.place", ("after",), "it checks verl's own advantages of the lowered rewards."),
)
"""What an extension needs that computes advantages of a group from rewards, instead of verl's estimator."""
_CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"


@dataclass(frozen=True)
class _Values(Section):
    """A section that is given by its values, without a configuration around it."""

    def read(self, config: Any) -> Any:
        return config


def read_values(
    section: str, values: Any, option: str, keys: Mapping[str, Key], rules: Sequence[Rule] = ()
) -> dict[str, Any]:
    """Return the values of a section, with those of ``option`` for missing keys.

    Args:
        option: the file that ships all keys, such as ``opd/advantage``.

    Raises:
        CheckError: unknown keys, invalid values, unused keys and contradictions, all at once.
    """
    shipped = _read_option(option)
    if found := list(_Values(section, shipped, keys, rules).find_problems(values)):
        raise CheckError(replace(problem, parts=EVERYTHING) for problem in found)
    return {
        name: {**default, **(values.get(name) or {})} if isinstance(default, Mapping) else values.get(name, default)
        for name, default in shipped.items()
    }


@cache
def _read_option(option: str) -> dict[str, Any]:
    """Read the values of an option; an empty mapping, which allows any keys, becomes null."""
    shipped: Any = OmegaConf.to_container(OmegaConf.load(_CONFIG_DIR / f"{option}.yaml"))
    return {
        name: {key: None if each == {} else each for key, each in value.items()} if isinstance(value, dict) else value
        for name, value in shipped.items()
    }


def find_late_weights(section: str, config: DictConfig) -> Iterator[Problem]:
    """Find corrections whose weights the trainer does not know before the update: they wait for pi or for signs."""
    read, off = partial(OmegaConf.select, config), f"or {section}=null."
    key, part = "correction.proximal", (section,)
    if (proximal := read(key)) in REUSED:
        reason = f"pi_old is not computed before the update, so {section} does not know the weights."
        fix = f"Set {key}=recompute, {off}"
        yield Problem(key, proximal, reason, fix, parts=part, overrides=(set_to(key, "recompute"),))
    if (ratio := read("correction.weight.ratio")) not in (None, "rollout"):
        key, reason = "correction.weight.ratio", f"it waits for pi, but {section} needs the weights before the update."
        yield Problem(key, ratio, reason, f"Set {key}=rollout, {off}", parts=part)
    for key in ("correction.weights", "correction.weight.when"):
        if (value := read(key)) and value != "any":
            reason = f"it is applied at the gradient step, but {section} needs the weights before."
            shown = list(value) if OmegaConf.is_config(value) else value
            yield Problem(key, shown, reason, f"Set one weight of all tokens, {off}", parts=part)


def divides_by_std(config: DictConfig) -> bool:
    """Return True if verl's estimator divides by the standard deviation of a group's rewards."""
    read = partial(OmegaConf.select, config)
    by_std = read("algorithm.norm_adv_by_std_in_grpo")
    return read("algorithm.adv_estimator") in ("grpo", "grpo_vectorized") and by_std is not False
