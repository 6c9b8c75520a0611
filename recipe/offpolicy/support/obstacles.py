"""Settings that the support's replay does not go together with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_REFERENCE = "the reference is the same engine without its adapter."
_SPLIT = "supports are not split over the ranks of a sequence."
_SERVER = "it has servers or workers of its own, beside which those that keep the support are not tested."
_FULL = "it reads log-probs over the whole vocabulary, and the worker's are over the support."


@dataclass(frozen=True)
class Obstacle:
    """One setting.

    Attributes:
        key: Hydra path.
        wanted: values that go together with the support; the first is the fix.
        reason: a sentence.
        otherwise: further keys to set with the fix, and their values.
    """

    key: str
    wanted: tuple[Any, ...]
    reason: str
    otherwise: tuple[tuple[str, Any], ...] = ()


OBSTACLES = (
    Obstacle(f"{_ROLLOUT}.mtp.enable_rollout", (False,), "tokens are proposed by another model first."),
    Obstacle(f"{_ROLLOUT}.disaggregation.enabled", (False,), "a request passes two servers."),
    Obstacle(f"{_MODEL}.use_fused_kernels", (False,), "fused kernels hide the logits."),
    Obstacle(f"{_MODEL}.mtp.enable", (False,), "further tokens are predicted, whose support nobody knows."),
    Obstacle(f"{_MODEL}.lora_rank", (0,), _REFERENCE),
    Obstacle(f"{_MODEL}.lora.rank", (0,), _REFERENCE),
    Obstacle(f"{_MODEL}.lora_adapter_path", (None,), _REFERENCE),
    Obstacle(f"{_ACTOR}.ulysses_sequence_parallel_size", (1,), _SPLIT),
    Obstacle(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", (1,), _SPLIT),
    Obstacle(f"{_ACTOR}.fsdp_config.router_replay.mode", ("disabled",), _SERVER),
    Obstacle("algorithm.use_kl_in_reward", (False,), _FULL, ((f"{_ACTOR}.use_kl_loss", True),)),
    Obstacle("distillation.enabled", (False,), _FULL),
    Obstacle("offpolicy.late_weights.snapshots", (None,), _SERVER),
)


def list_obstacles(config: DictConfig) -> Iterator[tuple[Obstacle, Any]]:
    """List what is set otherwise than the support needs, with the value; what is not set counts as it should be."""
    for one in OBSTACLES:
        value = OmegaConf.select(config, one.key)
        if value is not None and value not in one.wanted:
            yield one, value
    for section in ("process_reward", "opd"):
        if OmegaConf.select(config, section) is not None:
            yield Obstacle(section, (None,), _SERVER if section == "process_reward" else _FULL), "on"
