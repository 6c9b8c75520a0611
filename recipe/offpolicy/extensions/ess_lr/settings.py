"""Settings of the learning rate by effective sample size, the section ``ess_lr``, and its start-up checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import live_path

from ...batch.declared_keys import choice, number
from ...correction import Problem, SpecError
from ...correction.problem import set_to
from ..setting_checks import find_late_weights, read_values

KEYS = {"rule": choice("sqrt", "linear"), "floor": number("a factor in (0, 1]", most=1, above=0)}
_MU = "actor_rollout_ref.rollout.calculate_log_probs"


@dataclass(frozen=True)
class EssLrSettings:
    """Settings of one run: the factor is the ess, or its square root, and at least ``floor``."""

    rule: Literal["sqrt", "linear"]
    floor: float

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> EssLrSettings:
        """Read the section.

        Raises:
            CheckError, SpecError: unknown keys, or invalid values.
        """
        given = read_values(section, values, "ess_lr/sqrt", KEYS)
        if "rule" not in values:
            key, fix = f"{section}.rule", f"Set {section}=sqrt, or {section}=linear."
            raise SpecError("no rule is named.", fix, key=key, proposed={key: "sqrt"})
        return cls(**given)

    def compute_factor(self, ess: float) -> float:
        """Compute the factor; ``floor`` where no weight is above 0.

        Example:
            >>> EssLrSettings("sqrt", 0.1).compute_factor(0.25), EssLrSettings("linear", 0.5).compute_factor(0.25)
            (0.5, 0.5)
        """
        share = ess if self.rule == "linear" else math.sqrt(ess) if ess >= 0 else math.nan
        return self.floor if math.isnan(share) else min(1.0, max(self.floor, share))


def find_problems(section: str, settings: EssLrSettings, config: DictConfig) -> Iterator[Problem]:
    """Find conflicts with the configuration."""
    path, parts = live_path(config), (section,)
    if path.worker != "engine" or path.strategy not in ("fsdp", "fsdp2") or not path.attributes.scales_lr:
        reason = f"the optimizer is reached in the FSDP engine of verl 0.9.1 alone, and this is {path}."
        fix = f"Set actor_rollout_ref.actor.strategy=fsdp2 with verl 0.9.1, or {section}=null."
        yield Problem(section, "on", reason, fix, parts=parts)
    if settings.floor == 1:
        key, reason = f"{section}.floor", "no factor is below 1, so the learning rate stays as it is."
        yield Problem(key, settings.floor, reason, "", "NO-OP", parts, (set_to(key, 0.1),))
    if OmegaConf.select(config, _MU) is False:
        reason = "there are no ratios without the rollout's log-probs."
        yield Problem(_MU, False, reason, f"Set {_MU}=true.", parts=parts, overrides=(set_to(_MU, True),))
    yield from find_late_weights(section, config)
