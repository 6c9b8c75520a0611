"""Notes on parts of verl under which no correction was shown to act: they train, and the first update proves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import live_path

from ...correction import CorrectionSpec, Problem
from ..verl_keys.estimators import WITHOUT_PI_OLD
from ..verl_keys.keys import list_active
from .config_reader import ACTOR, ENGINE, ROLLOUT
from .rollout import UNTESTED_ENGINES

_MODEL = "actor_rollout_ref.model"
_MEGATRON = f"{ACTOR}.megatron"
_FSDP = f"{ACTOR}.fsdp_config"

_ABOVE_ONE = {
    f"{ACTOR}.ulysses_sequence_parallel_size": "sequences split over ranks (Ulysses)",
    f"{_FSDP}.ulysses_sequence_parallel_size": "sequences split over ranks (Ulysses)",
    f"{_MEGATRON}.context_parallel_size": "sequences split over ranks (context parallelism)",
    f"{_MEGATRON}.virtual_pipeline_model_parallel_size": "interleaved pipelines",
    f"{ROLLOUT}.data_parallel_size": "data parallelism within a rollout server",
    f"{ROLLOUT}.expert_parallel_size": "expert parallelism within a rollout server",
    f"{ROLLOUT}.pipeline_model_parallel_size": "pipelines within a rollout server",
    f"{_MODEL}.lora_rank": "LoRA",
    f"{_MODEL}.lora.rank": "LoRA",
}
_TRUE = {
    f"{_MODEL}.use_fused_kernels": "fused kernels of the log-probs",
    f"{_MODEL}.use_liger": "Liger's kernels",
    f"{_MODEL}.tiled_mlp.enabled": "a tiled MLP",
    f"{_MODEL}.mtp.enable": "multi-token prediction",
    f"{ACTOR}.use_prefix_grouper": "grouped prefixes",
    f"{ROLLOUT}.disaggregation.enabled": "prefill apart from decoding",
    "async_training.use_trainer_do_validate": "validation on the trainer's devices",
    "async_training.use_dynamic_resource_scheduling": "rollouts on the trainer's devices",
    f"{_FSDP}.qat.enable": "training for quantised weights",
    f"{_MEGATRON}.qat.enable": "training for quantised weights",
    "actor_rollout_ref.actor.freeze_vision_tower": "models with images",
}
_SET = {
    f"{ROLLOUT}.quantization": "a quantised rollout engine",
    f"{ENGINE}.quantization": "a quantised rollout engine",
    f"{ROLLOUT}.limit_images": "models with images",
    f"{_MODEL}.lora_adapter_path": "LoRA",
    f"{_MODEL}.lora.adapter_path": "LoRA",
    f"{ENGINE}.speculative_config": "speculative decoding",
}
_ESTIMATOR = "algorithm.adv_estimator"
_DTYPES = (f"{ROLLOUT}.dtype", f"{ENGINE}.kv_cache_dtype", f"{ENGINE}.kv-cache-dtype")


def warn_not_shown(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of devices, estimators, kernels and layouts under which no correction was run."""
    if spec.is_none and not list_active(config):
        return
    for key, value, what in _find(config):
        reason = f"corrections were not shown on {what}: the first update proves this one, or stops."
        yield Problem(key, value, reason, "", "NOTE", ())


def _find(config: DictConfig) -> Iterator[tuple[str, Any, str]]:
    def read(key: str) -> Any:
        return OmegaConf.select(config, key)

    if (engine := read(f"{ROLLOUT}.name")) not in (None, "vllm"):
        owner = "this" if engine in UNTESTED_ENGINES else "a program's own"
        condition = "whose log-probs have to be those of the sampled tokens at the run's temperature"
        yield f"{ROLLOUT}.name", engine, f"{owner} rollout engine, {condition}"
    if (device := read("trainer.device")) not in (None, "cuda", "cpu"):
        yield "trainer.device", device, f"{device} devices"
    if (estimator := read(_ESTIMATOR)) is not None and estimator not in WITHOUT_PI_OLD:
        yield _ESTIMATOR, estimator, "estimators that read pi_old, or that are the user's own"
    for key in _DTYPES:
        if "fp8" in str(value := read(key)) or "int8" in str(value):
            yield key, value, f"rollouts in {value}"
    path = live_path(config)
    for key, what in _ABOVE_ONE.items():
        # Each was run with it.
        if (path.worker == "legacy" and "ulysses" in key) or (path.trainer == "v1" and key == f"{_MODEL}.lora_rank"):
            continue
        value = read(key)
        least = 0 if "lora" in key else 1
        if isinstance(value, int) and value > least:
            yield key, value, what
    for key, what in _TRUE.items():
        if read(key) is True:
            yield key, True, what
    for key, what in _SET.items():
        if (value := read(key)) not in (None, ""):
            yield key, value, what
