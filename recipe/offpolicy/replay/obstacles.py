"""Settings of verl's that routing replay on FSDP does not go together with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .batch_routes import Mode

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_REFERENCE = "the reference is the same engine without its adapter, and would replay too."
_SPLIT = "routes are not split over the ranks of a sequence."


@dataclass(frozen=True)
class Obstacle:
    """One setting.

    Attributes:
        key: Hydra path.
        wanted: the value that replay needs.
        reason: a sentence.
    """

    key: str
    wanted: Any
    reason: str


_OF_ANY_MODE = (
    Obstacle(f"{_MODEL}.use_fused_kernels", False, "fused kernels take the place of the model's forward."),
    Obstacle(f"{_MODEL}.mtp.enable", False, "layers that predict further tokens choose experts that nobody recorded."),
    Obstacle(f"{_MODEL}.lora_rank", 0, _REFERENCE),
    Obstacle(f"{_MODEL}.lora.rank", 0, _REFERENCE),
    Obstacle(f"{_MODEL}.lora_adapter_path", None, _REFERENCE),
    Obstacle(f"{_ACTOR}.ulysses_sequence_parallel_size", 1, _SPLIT),
    Obstacle(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 1, _SPLIT),
)
_OF_R3 = Obstacle("actor_rollout_ref.rollout.name", "vllm", "R3 is proved with the routes that vLLM returns.")


def list_obstacles(config: DictConfig, mode: Mode = "R3") -> list[Obstacle]:
    """List what is set otherwise than replay needs; what is not set counts as it should be."""
    asked = (*_OF_ANY_MODE, _OF_R3) if mode == "R3" else _OF_ANY_MODE
    return [one for one in asked if OmegaConf.select(config, one.key) not in (None, one.wanted)]
