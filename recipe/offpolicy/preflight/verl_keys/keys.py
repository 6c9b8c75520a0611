"""Names and readers of verl's own correction keys."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...correction.dialects.verl import VERL_DEFAULTS

DEFAULTS = VERL_DEFAULTS
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
VERL = "algorithm.rollout_correction"
WORKERS = f"{ACTOR}.policy_loss.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
BYPASS = "bypass_mode"
FREE = re.compile(r"(?:^|_)(?:kwargs|override|env_vars|extra)(?:_|$)")
"""Names of sections of verl in which any key can be added, for other programs."""


def read_rollout_correction(config: DictConfig) -> dict[str, Any]:
    """Read ``algorithm.rollout_correction`` as plain values; empty if it is null."""
    return to_plain(OmegaConf.select(config, VERL))


def find_changed_keys(config: DictConfig) -> dict[str, Any]:
    """Find keys of ``algorithm.rollout_correction`` that differ from verl's defaults."""
    return {
        k: v
        for k, v in read_rollout_correction(config).items()
        if k != "_target_" and (k not in DEFAULTS or v != DEFAULTS[k])
    }


def list_active(config: DictConfig) -> tuple[str, ...]:
    """List which of rollout_is, rollout_rs and bypass_mode are switched on."""
    asked = read_rollout_correction(config)
    return tuple(key for key in ("rollout_is", "rollout_rs", BYPASS) if asked.get(key) not in (None, False))


def name_part(key: str) -> str:
    """Return the name under which a part of verl's own correction is reported."""
    return f"rollout_correction.{key}"


def read_workers_copy(config: DictConfig) -> dict[str, Any]:
    """Read what the bypass-mode loss reads: the given keys over verl's dataclass defaults, unlike its YAML's."""
    node = OmegaConf.select(config, WORKERS)
    typed = {"rollout_is": "sequence"} if node is None or "_target_" in node else {}
    return {**DEFAULTS, **typed, **to_plain(node)}


def to_plain(node: Any) -> dict[str, Any]:
    """Convert a node to a dict of plain values; empty if it is none."""
    values = OmegaConf.to_container(node, resolve=True) if node is not None else {}
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def get_value(config: DictConfig, key: str) -> Any:
    """Return the value at a dotted key; None if it is null or missing."""
    return OmegaConf.select(config, key, default=None)
