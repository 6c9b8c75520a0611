"""The keys ``offpolicy.late_weights``, and how the lag of the rollout engine's weights is found from scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import USE_V1, live_path

from ...batch.declared_keys import Section, count, read_shipped_defaults
from ...correction import Problem
from ...correction.problem import Requirement, find_unmet, set_to

SECTION = "offpolicy.late_weights"
SNAPSHOTS = f"{SECTION}.snapshots"
_V1, _FSDP = "trainer.v1", "actor_rollout_ref.actor.fsdp_config"


@dataclass(frozen=True)
class SnapshotSettings:
    """Settings of a run that keeps weights to measure the lag of the rollout engine's weights.

    Attributes:
        snapshots: number of updates whose weights are kept.
        rows: number of rows per step that are scored again with each snapshot.
    """

    snapshots: int
    rows: int

    @classmethod
    def from_config(cls, config: DictConfig) -> SnapshotSettings | None:
        """Read the settings of a checked configuration; None if no weights are kept."""
        given = OmegaConf.select(config, SECTION)
        values = {**read_shipped_defaults("late_weights"), **(given or {})}
        return None if values["snapshots"] is None else cls(**values)


KEYS = Section(
    SECTION,
    read_shipped_defaults("late_weights"),
    {
        "snapshots": count("a number of updates, 1 or more, or null for none", null=True),
        "rows": count("a number of rows, 1 or more"),
    },
    hints={"snapshots": 8},
)


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find invalid values of the keys, and settings under which weights cannot be kept or compared."""
    found = list(KEYS.find_problems(config))
    yield from found
    if not found and (snapshots := OmegaConf.select(config, SNAPSHOTS)) is not None:
        yield from _find_obstacles(config, snapshots)


_REQUIREMENTS = (
    Requirement(
        f"{_V1}.trainer_mode", ("sync",), "several versions sample the rows of a step, and are recorded per token."
    ),
    Requirement(f"{_FSDP}.router_replay.mode", ("disabled",), "rows are scored again with the trainer's own routes."),
    Requirement("actor_rollout_ref.rollout.temperature", (1.0,), "rows are scored again at temperature 1."),
    Requirement(f"{_FSDP}.param_offload", (False,), "verl copies weights on the accelerator, not offloaded ones."),
)


def _find_obstacles(config: DictConfig, snapshots: int) -> Iterator[Problem]:
    path, off = live_path(config), set_to(SNAPSHOTS, None)
    if path.trainer != "v1" or not path.attributes.token_versions:
        where = f"verl {path.release} with its {path.trainer.upper()} trainer"
        reason = f"weights can be kept only under the V1 trainer, tested with verl 0.9.1, but this run uses {where}."
        use = f"{USE_V1}=true" if path.release.startswith("0.9.1") else f"{USE_V1}=true with verl 0.9.1"
        yield Problem(SNAPSHOTS, snapshots, reason, f"Set {use}, or {off} to keep no weights.", parts=())
        return
    for each in find_unmet(_REQUIREMENTS, partial(OmegaConf.select, config), off, ()):
        # The problem is reported at this package's key, because only the user knows which of the two keys was intended.
        yield replace(each, key=SNAPSHOTS, value=snapshots, overrides=(), alongside={each.key: each.value})


TOLD = 0.5
"""A lag is identified if the older weights' distance from mu is at most this fraction of the current weights'
distance."""


def find_lag(apart: Sequence[float]) -> int | None:
    """Find the number of updates by which the engine's weights lag; None if it cannot be identified.

    Args:
        apart: mean |log mu - log pi| over a few tokens, under the current weights, the weights before them, and so on.
    """
    if not all(map(math.isfinite, apart)):
        return None
    nearest = min(range(len(apart)), key=apart.__getitem__)
    return nearest if nearest == 0 or apart[nearest] <= TOLD * apart[0] else None
