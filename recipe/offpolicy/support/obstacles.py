"""Settings that are incompatible with support replay."""

from __future__ import annotations

from ..correction.requirement import Requirement

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_REFERENCE = "the reference is the same engine without its adapter."
_SPLIT = "likeliest tokens are not split over sequence-parallel ranks."
_SERVER = "it uses its own servers or workers, which were not tested with those that return the likeliest tokens."
_FULL = "it reads log-probs over the whole vocabulary, but the worker's are over the support."
_OF_BOTH = (
    Requirement(f"{_ROLLOUT}.name", ("vllm",), "verl's vLLM servers alone return the likeliest tokens."),
    Requirement(f"{_ROLLOUT}.mtp.enable_rollout", (False,), "a draft model proposes tokens first."),
    Requirement(f"{_ROLLOUT}.disaggregation.enabled", (False,), "a request passes through two servers."),
    Requirement(f"{_MODEL}.use_fused_kernels", (False,), "fused kernels hide the logits."),
    Requirement(f"{_MODEL}.mtp.enable", (False,), "the engine predicts further tokens of its own."),
    Requirement(f"{_ACTOR}.ulysses_sequence_parallel_size", (1,), _SPLIT),
    Requirement(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", (1,), _SPLIT),
    Requirement(f"{_ACTOR}.fsdp_config.router_replay.mode", ("disabled",), _SERVER),
    Requirement("offpolicy.late_weights.snapshots", (None,), _SERVER),
    Requirement("process_reward", (None,), _SERVER),
)
OF_CENTERING = (*_OF_BOTH, Requirement("opd", (None,), _SERVER))
"""What hides the logits or the likeliest tokens; an enabled section has the value "on"."""
REQUIREMENTS = (
    *_OF_BOTH,
    Requirement(f"{_MODEL}.lora_rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora.rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora_adapter_path", (None,), _REFERENCE),
    Requirement("algorithm.use_kl_in_reward", (False,), _FULL, ((f"{_ACTOR}.use_kl_loss", True),)),
    Requirement("distillation.enabled", (False,), _FULL),
    Requirement("opd", (None,), _FULL),
)
"""The same for the support, and what reads other log-probs than those over it."""
