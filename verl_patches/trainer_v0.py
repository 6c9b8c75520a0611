"""Contracts on verl's V0 trainer, ``RayPPOTrainer``: methods that a corrected trainer overrides.

``fit`` is one long method that calls the module's ``compute_advantage``. Hooks around the advantages therefore wrap
that function, both in its own module and wherever another module has imported it by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .contract import wrap
from .engine_loss import Seams
from .releases import specifiers

_V0_PROGRAM = "verl.trainer.main_ppo_v0"
"""Module of the V0 task runner in releases whose main_ppo contains a different task runner."""
_TRAINER = "verl.trainer.ppo.ray_trainer"
_ADVANTAGE = Seams(_TRAINER)(
    "compute_advantage",
    "(data, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=True, config=None)",
)
_trainer = Seams(f"{_TRAINER}:RayPPOTrainer")

SEAMS = (
    _trainer("init_workers", "(self)"),
    _trainer("_compute_old_log_prob", "(self, batch)", names=("actor_rollout_wg", "compute_log_prob")),
    _trainer("_compute_ref_log_prob", "(self, batch)"),
    _trainer("_update_actor", "(self, batch)", names=("actor_rollout_wg", "update_actor")),
    _trainer(
        "fit",
        "(self)",
        names=(
            "compute_advantage",
            "_get_gen_batch",
            "_compute_old_log_prob",
            "_update_actor",
            "_save_checkpoint",
            "_load_checkpoint",
            "_validate",
        ),
    ),
    _trainer("_get_gen_batch", "(self, batch)"),
    _trainer("_validate", "(self, merged=False)", names=("_val_metrics_update",)),
    _trainer("_val_metrics_update", "(self, data_sources, sample_uids, reward_extra_infos_dict, ...)"),
    _trainer("_get_dp_size", "(self, worker_group, role)"),
    _trainer("_save_checkpoint", "(self)"),
    _trainer("_load_checkpoint", "(self)", names=("train_dataloader",)),
    _ADVANTAGE,
)

_separate = Seams(
    "verl.experimental.separation.ray_trainer:SeparateRayPPOTrainer",
    specifiers(lambda release: release.separate_programs),
)
SEAMS_OF_PROGRAMS = (
    _separate("_init_models", "(self)", names=("actor_rollout_wg",)),
    _separate("_fit_compute_log_prob", "(self, batch)", names=("_compute_old_log_prob",)),
    _separate("_fit_compute_advantage", "(self, batch)", names=("compute_advantage",)),
    _separate("_fit_update_actor", "(self, batch)", names=("_update_actor",)),
)
"""Functions on which the trainers of fully_async_policy and one_step_off_policy rely."""

_around: list[Callable[..., Any]] = []


def find_task_runner(config: DictConfig) -> Any:
    """Return verl's task runner for the configured trainer; None if there is only one task runner."""
    module = importlib.import_module("verl.trainer.main_ppo")
    if OmegaConf.select(config, "trainer.use_v1", default=False) and hasattr(module, "TaskRunnerV1"):
        return module.TaskRunnerV1
    return importlib.import_module(_V0_PROGRAM).TaskRunner if importlib.util.find_spec(_V0_PROGRAM) else None


def plain_advantage() -> Callable[..., Any]:
    """Return verl's own ``compute_advantage``, which both trainers call, without ``around_advantage``'s wrapper."""
    found: Callable[..., Any] = inspect.unwrap(importlib.import_module(_TRAINER).compute_advantage)
    return found


def hook_advantage() -> None:
    """Wrap ``compute_advantage``, including where other modules have imported it by name. Idempotent."""
    module = importlib.import_module(_TRAINER)
    plain = module.compute_advantage
    wrap(_ADVANTAGE, lambda original, *args, **kwargs: (_around[-1] if _around else _call)(original, *args, **kwargs))
    # Ray sends functions of ``__main__`` by value, together with what they have imported by name.
    for names in [vars(each) for each in list(sys.modules.values()) if isinstance(each, ModuleType)]:
        for name in [name for name, value in names.items() if value is plain]:
            names[name] = module.compute_advantage


def around_advantage(hook: Callable[..., Any]) -> None:
    """Run ``hook(compute, data, *args, **kwargs)`` instead of ``compute_advantage``; the hook given last is used."""
    # The hook is replaced in place: the function is wrapped only once, and a later trainer's hook replaces the earlier
    # one.
    _around[:] = [hook]
    hook_advantage()


def _call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)
