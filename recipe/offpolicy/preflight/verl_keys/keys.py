"""What the configuration says under verl's own keys, and their names."""

from __future__ import annotations

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


def own(config: DictConfig) -> dict[str, Any]:
    """``algorithm.rollout_correction``; empty where it is null."""
    return plain(OmegaConf.select(config, VERL))


def changes(config: DictConfig) -> dict[str, Any]:
    """Keys of verl's own ``algorithm.rollout_correction`` that differ from what verl ships."""
    return {k: v for k, v in own(config).items() if k != "_target_" and (k not in DEFAULTS or v != DEFAULTS[k])}


def active(config: DictConfig) -> tuple[str, ...]:
    """What verl's own correction is asked for: of rollout_is, rollout_rs and bypass_mode."""
    asked = own(config)
    return tuple(key for key in ("rollout_is", "rollout_rs", BYPASS) if asked.get(key) not in (None, False))


def part(key: str) -> str:
    """The name under which a part of verl's own correction is reported."""
    return f"rollout_correction.{key}"


def workers_own(config: DictConfig) -> dict[str, Any]:
    """What the loss of bypass mode reads: where the key is left out, verl's dataclass, which differs from its YAML."""
    node = OmegaConf.select(config, WORKERS)
    typed = {"rollout_is": "sequence"} if node is None or "_target_" in node else {}
    return {**DEFAULTS, **typed, **plain(node)}


def plain(node: Any) -> dict[str, Any]:
    values = OmegaConf.to_container(node, resolve=True) if node is not None else {}
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def value_of(config: DictConfig, key: str) -> Any:
    """The value at a dotted key, None where it is null or is not there."""
    return OmegaConf.select(config, key, default=None)
