"""Checks of what verl's asynchronous programs do in other processes, and of adapters that never reach the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import FULLY_ASYNC, find_program_mode, live_path

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from ...extensions.registry import load_extensions
from ...support.support_settings import SUPPORT
from .config_reader import ROLLOUT, SUPPORT_PART

_MODEL = "actor_rollout_ref.model"
_MERGE = f"{_MODEL}.lora.merge"
_RANKS = {"fsdp": f"{_MODEL}.lora_rank", "megatron": f"{_MODEL}.lora.rank"}
_ALPHAS = {"fsdp": f"{_MODEL}.lora_alpha", "megatron": f"{_MODEL}.lora.alpha"}
_ADAPTER = f"{_MODEL}.lora_adapter_path"
_BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
_FORMAT = f"{ROLLOUT}.load_format"


def check_program(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that nothing is asked of an asynchronous program that its other processes would have to do."""
    if live_path(config).mode == "separate_async" and OmegaConf.select(config, _BACKEND) == "naive":
        reason = "trainer_mode=separate_async has servers of its own, and verl refuses to send them weights so."
        yield Problem(_BACKEND, "naive", reason, overrides=(set_to(_BACKEND, "nccl"),))
    program = find_program_mode(config)
    if program is None:
        return
    if spec.support is not None:
        reason = f"{program}_policy samples in processes that do not replay supports."
        yield Problem(SUPPORT, spec.support, reason, f"Set {set_to(SUPPORT, None)}.", parts=(SUPPORT_PART,))
    if program != FULLY_ASYNC:
        return
    for extension in load_extensions(config):
        section = extension.section
        reason = f"{program}_policy takes prompts and validates in another process, which {section} does not reach."
        yield Problem(section, "on", reason, f"Set {section}=null.", parts=(section,))


def check_lora(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that LoRA is trained, and that the rollout engine gets what was trained, merged or as an adapter."""
    path = live_path(config)
    own, other = ("megatron", "fsdp") if path.strategy == "megatron" else ("fsdp", "megatron")
    key, rank = _RANKS[own], OmegaConf.select(config, _RANKS[own])
    if not rank:
        yield from _find_unread(config, own, other)
        return
    legacy = path.worker == "legacy" and own == "fsdp"
    merges = own == "megatron" or (path.attributes.merged_lora and not legacy)
    backend, engine = OmegaConf.select(config, _BACKEND), OmegaConf.select(config, f"{ROLLOUT}.name")
    apart = find_program_mode(config) is not None or path.mode == "separate_async" or backend not in (None, "naive")
    adapters = not apart and {"trtllm": False, "sglang": own in path.attributes.sglang_adapters}.get(str(engine), True)
    merged = bool(OmegaConf.select(config, _MERGE))
    beside: dict[str, Any] = {_MERGE: merged}
    overrides: tuple[str, ...] = ()
    if merged and not merges:
        reason = f"verl {path.release} sends the base weights without the adapter: rollouts would never see an update."
        if legacy:
            reason = "the legacy actor does not merge, and the rollout engine would refuse its adapters."
        overrides = (set_to(_MERGE, False),) if adapters else ()
    elif apart and backend == "delta_sharded":
        reason = "this checkpoint engine does not know LoRA."
        beside = {_BACKEND: backend}
        overrides = (set_to(_BACKEND, "nccl"), set_to(_MERGE, True)) if merges else ()
    elif not merged and not adapters:
        who = "a checkpoint engine sends" if apart else f"{engine} under verl {path.release} loads"
        reason = f"{who} the base weights without the adapter: rollouts would never see an update."
        beside[_BACKEND if apart else f"{ROLLOUT}.name"] = backend if apart else engine
        overrides = (set_to(_MERGE, True),) if merges else ()
    elif legacy and "dummy" in str(OmegaConf.select(config, _FORMAT)):
        reason = "the first rollouts after a resume, or with an adapter to begin with, are those of the base weights."
        beside = {_FORMAT: OmegaConf.select(config, _FORMAT)}
        overrides = (set_to(_FORMAT, "safetensors"),)
    else:
        return
    fix = "" if overrides else "No setting of this release delivers it: train without LoRA, or use verl 0.9.1."
    yield Problem(key, rank, reason, fix, overrides=overrides, beside=beside)


def _find_unread(config: DictConfig, own: str, other: str) -> Iterator[Problem]:
    """Find keys of LoRA that this trainer's engine does not read, so that it would train all weights."""
    if rank := OmegaConf.select(config, _RANKS[other]):
        alpha = OmegaConf.select(config, _ALPHAS[other])
        overrides = (set_to(_RANKS[own], rank), *(() if alpha is None else (set_to(_ALPHAS[own], alpha),)))
        reason = f"{own} does not read it, and would train all weights."
        yield Problem(_RANKS[other], rank, reason, overrides=overrides, translated=True)
    elif own == "fsdp" and (adapter := OmegaConf.select(config, _ADAPTER)):
        reason = f"without {_RANKS[own]} it is not loaded, and all weights would be trained."
        yield Problem(_ADAPTER, adapter, reason, f"Set {_RANKS[own]} to the rank of this adapter.")
