"""Checks of what verl's asynchronous programs do in other processes, and of adapters that never reach the engine."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import FULLY_ASYNC, find_program_mode, live_path

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from ...extensions.registry import load_extensions
from ...support.support_settings import SUPPORT
from .config_reader import ROLLOUT, SUPPORT_PART

_LORA = "actor_rollout_ref.model"
_MERGE = f"{_LORA}.lora.merge"
_BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"


def check_program(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that nothing is asked of an asynchronous program that its other processes would have to do."""
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
    """Check that a checkpoint engine sends adapters: it calls verl's engine for base weights, or for merged ones."""
    key = next((each for each in (f"{_LORA}.lora_rank", f"{_LORA}.lora.rank") if OmegaConf.select(config, each)), None)
    backend = OmegaConf.select(config, _BACKEND)
    separate = find_program_mode(config) is not None or live_path(config).mode == "separate_async"
    if key is None or OmegaConf.select(config, _MERGE) or (backend in (None, "naive") and not separate):
        return
    reason = "a checkpoint engine sends the base weights without the adapter: rollouts would never see an update."
    beside = {_BACKEND: backend}
    override = set_to(_MERGE, True)
    rank = OmegaConf.select(config, key)
    yield Problem(
        key, rank, reason, f"Set {override}, which sends merged weights.", overrides=(override,), beside=beside
    )
