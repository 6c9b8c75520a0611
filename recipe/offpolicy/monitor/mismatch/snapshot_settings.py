"""Parsing and validation of the keys ``offpolicy.late_weights``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import live_path

from ...batch.shipped_defaults import read_shipped_defaults
from ...correction import Problem
from ...correction.problem import remove, set_to

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


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find what is wrong with the keys, and what keeps weights from being kept or compared."""
    shipped = read_shipped_defaults("late_weights")
    values = OmegaConf.select(config, SECTION)
    if values is None:
        return
    given: Any = OmegaConf.to_container(values) if isinstance(values, DictConfig) else values
    if not isinstance(given, Mapping):
        fix = f"Set {SNAPSHOTS}=8, or remove this override."
        yield Problem(SECTION, given, "not the keys of snapshots.", fix, parts=(), overrides=remove(SECTION, given))
        return
    wrong = False
    for name, value in given.items():
        key = f"{SECTION}.{name}"
        if name not in shipped:
            yield Problem(key, value, "unknown key.", parts=(), overrides=remove(key, value))
        elif not (_is_count(value) or (name == "snapshots" and value is None)):
            wrong = True
            reason = f"not a number of {'updates' if name == 'snapshots' else 'rows'}, 1 or more."
            yield Problem(key, value, reason, parts=(), overrides=(set_to(key, shipped[name]),))
    if not wrong and given.get("snapshots") is not None:
        yield from _find_obstacles(config, given["snapshots"])


def _find_obstacles(config: DictConfig, snapshots: int) -> Iterator[Problem]:
    path, off = live_path(config), set_to(SNAPSHOTS, None)
    if path.trainer != "v1" or not path.attributes.token_versions:
        where = f"verl {path.release} with its {path.trainer.upper()} trainer"
        reason = f"the worker that keeps weights is that of the V1 trainer of 0.9.1, and this is {where}."
        yield Problem(SNAPSHOTS, snapshots, reason, f"Set {off}.", parts=(), overrides=(off,))
        return
    if (mode := OmegaConf.select(config, _MODE)) not in (None, "sync"):
        reason = (
            f"rows of a step were sampled by several versions under {_MODE}={mode}, which are noted by token there."
        )
        yield Problem(SNAPSHOTS, snapshots, reason, f"Set {off}.", parts=(), overrides=(off,))
    if OmegaConf.select(config, _REPLAY) not in (None, "disabled"):
        reason = (
            f"rows are scored again by the trainer's own routes, and {_REPLAY} is on because they differ from mu's."
        )
        yield Problem(SNAPSHOTS, snapshots, reason, f"Set {off}.", parts=(), overrides=(off,))
    if (temperature := OmegaConf.select(config, _TEMPERATURE)) not in (None, 1, 1.0):
        reason = f"rows are scored again at temperature 1, and {_TEMPERATURE}={temperature:g}."
        yield Problem(SNAPSHOTS, snapshots, reason, f"Set {off}.", parts=(), overrides=(off,))
    if OmegaConf.select(config, _OFFLOAD):
        reason = f"verl copies weights that lie on the accelerator, and {_OFFLOAD} takes them off it."
        yield Problem(SNAPSHOTS, snapshots, reason, f"Set {off}, or {_OFFLOAD}=false.", parts=(), overrides=(off,))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
