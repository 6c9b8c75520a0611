"""verl settings that are incompatible with routing replay on FSDP."""

from __future__ import annotations

from ..correction.requirement import Requirement
from .batch_routes import Mode

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_REFERENCE = "the reference is the same engine without its adapter, and would replay too."
_SPLIT = "routes are not split over sequence-parallel ranks."
_OF_ANY_MODE = (
    Requirement(f"{_MODEL}.use_fused_kernels", (False,), "fused kernels replace the model's forward."),
    Requirement(f"{_MODEL}.mtp.enable", (False,), "layers that predict further tokens choose experts themselves."),
    Requirement(f"{_MODEL}.lora_rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora.rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora_adapter_path", (None,), _REFERENCE),
    Requirement(f"{_ACTOR}.ulysses_sequence_parallel_size", (1,), _SPLIT),
    Requirement(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", (1,), _SPLIT),
)
_OF_R3 = Requirement("actor_rollout_ref.rollout.name", ("vllm",), "R3 is tested only with vLLM's routes.")


def list_requirements(mode: Mode) -> tuple[Requirement, ...]:
    """List the configuration values that replay in this mode needs."""
    return (*_OF_ANY_MODE, _OF_R3) if mode == "R3" else _OF_ANY_MODE
