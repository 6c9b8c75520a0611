"""Settings of the optimal baseline, the section ``optimal_baseline``, and its start-up checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from ...batch.declared_keys import choice
from ...correction import Problem, SpecError
from ...correction.requirement import find_unmet
from ..setting_checks import OWN_ESTIMATE, find_late_weights, read_values

KEYS = {"over": choice("group", "leave_one_out")}


@dataclass(frozen=True)
class BaselineSettings:
    """Settings of one run.

    Attributes:
        over: the rollouts that the baseline of a rollout is made of: all of its group, or the others.
    """

    over: Literal["group", "leave_one_out"]

    @classmethod
    def from_mapping(cls, section: str, values: Mapping[str, Any]) -> BaselineSettings:
        """Read the section.

        Raises:
            CheckError, SpecError: unknown keys, or invalid values.
        """
        given = read_values(section, values, "optimal_baseline/group", KEYS)
        if "over" not in values:
            key, fix = f"{section}.over", f"Set {section}=group, or {section}=leave_one_out."
            raise SpecError("no baseline is named.", fix, key=key, proposed={key: "group"})
        return cls(**given)


def find_problems(section: str, config: DictConfig) -> Iterator[Problem]:
    """Find conflicts with the configuration."""
    read, off = partial(OmegaConf.select, config), f"{section}=null"
    yield from find_unmet(OWN_ESTIMATE, read, off, (section,))
    yield from find_late_weights(section, config)
    key = "actor_rollout_ref.rollout.n"
    if int(read(key) or 1) == 1:
        reason = "a group of one has no sibling to compare with."
        yield Problem(key, read(key), reason, f"Set {key}=8, or {off}.", "NO-OP", (section,))
