"""Parsing and validation of the keys ``offpolicy.late_weights``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import USE_V1, live_path

from ...batch.declared_keys import Section, count
from ...batch.shipped_defaults import read_shipped_defaults
from ...correction import Problem
from ...correction.problem import set_to

SECTION = "offpolicy.late_weights"
SNAPSHOTS = f"{SECTION}.snapshots"
_MODE = "trainer.v1.trainer_mode"
_REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
_TEMPERATURE = "actor_rollout_ref.rollout.temperature"
_OFFLOAD = "actor_rollout_ref.actor.fsdp_config.param_offload"


@dataclass(frozen=True)
class SnapshotSettings:
    """Settings of a run that keeps weights to tell by how many updates the engine's lag.

    Attributes:
        snapshots: updates whose weights are kept.
        rows: of a step that are scored again under each.
    """

    snapshots: int
    rows: int

    @classmethod
    def from_config(cls, config: DictConfig) -> SnapshotSettings | None:
        """Read the settings of a checked configuration; None where no weights are kept."""
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
    """Find what is wrong with the keys, and what keeps weights from being kept or compared."""
    found = list(KEYS.find_problems(config))
    yield from found
    if not found and (snapshots := OmegaConf.select(config, SNAPSHOTS)) is not None:
        yield from _find_obstacles(config, snapshots)


def _find_obstacles(config: DictConfig, snapshots: int) -> Iterator[Problem]:
    path, off = live_path(config), set_to(SNAPSHOTS, None)

    def refuse(reason: str, instead: str) -> Problem:
        return Problem(SNAPSHOTS, snapshots, reason, f"Set {instead}, or {off} to go without them.", parts=())

    if path.trainer != "v1" or not path.attributes.token_versions:
        where = f"verl {path.release} with its {path.trainer.upper()} trainer"
        reason = f"weights are kept under the V1 trainer, as tested with verl 0.9.1, and this is {where}."
        use = f"{USE_V1}=true" if path.release.startswith("0.9.1") else f"{USE_V1}=true with verl 0.9.1"
        yield refuse(reason, use)
        return
    if (mode := OmegaConf.select(config, _MODE)) not in (None, "sync"):
        reason = (
            f"rows of a step were sampled by several versions under {_MODE}={mode}, which are noted by token there."
        )
        yield refuse(reason, f"{_MODE}=sync")
    if OmegaConf.select(config, _REPLAY) not in (None, "disabled"):
        reason = (
            f"rows are scored again by the trainer's own routes, and {_REPLAY} is on because they differ from mu's."
        )
        yield refuse(reason, f"{_REPLAY}=disabled")
    if (temperature := OmegaConf.select(config, _TEMPERATURE)) not in (None, 1, 1.0):
        reason = f"rows are scored again at temperature 1, and {_TEMPERATURE}={temperature:g}."
        yield refuse(reason, f"{_TEMPERATURE}=1.0")
    if OmegaConf.select(config, _OFFLOAD):
        reason = f"verl copies weights that lie on the accelerator, and {_OFFLOAD} takes them off it."
        yield refuse(reason, f"{_OFFLOAD}=false")
