"""Hooks verl's trainers in every process of a corrected run. The launch makes verl import this module.

The trainer of every supported program derives from ``RayPPOTrainer`` (V0: main_ppo, one_step_off_policy,
fully_async_policy, recipes) or from the V1 ``PPOTrainer``. The hook runs when an instance is created, so it also works
for trainers that do not call ``super().__init__``. It creates a ``CorrectedRun``, which sets its methods on the
instance. This module imports nothing from verl, so a process without a trainer only pays for the import hooks.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from verl_patches.deferred import after_import

from ..fault_tolerance.redaction import redact_streams, redact_text

MODULE = __name__
"""Name of this module, for VERL_USE_EXTERNAL_MODULES."""
HOOKED = "offpolicy.hooked"
"""Configuration key that only a process with the hooks can resolve."""
_RESOLVER = "offpolicy_hooked"
_V0, _V1 = "verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base"
_GROUPS = "verl.single_controller.base.worker_group"
_WORKERS = ("verl.workers.engine_workers", "verl.workers.fsdp_workers", "verl.workers.megatron_workers")
_VLLM = "verl.workers.rollout.vllm_rollout"
_ENGINE = {f"{_VLLM}.utils": "extend_worker", f"{_VLLM}.vllm_async_server": "extend_server"}
_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter"
_MARK = "__offpolicy__"
_installed: set[str] = set()
logger = logging.getLogger("verl.offpolicy")
LEVEL = "VERL_LOGGING_LEVEL"
"""Environment variable with the level of verl's loggers."""


def mark(config: Any) -> None:
    """Add a value to the configuration that cannot be resolved in a process without the hooks."""
    from omegaconf import OmegaConf

    OmegaConf.update(config, HOOKED, f"${{{_RESOLVER}:}}", force_add=True)
    _register()


def _register() -> None:
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver(_RESOLVER, lambda: True, replace=True)


def install() -> None:
    """Hook verl's trainers as soon as their modules are imported. Idempotent."""
    _register()
    hooks = {_V0: _hook_v0, _V1: _hook_v1, _GROUPS: _hook_groups, _ROLLOUTER: _hook_client}
    hooks |= {module: partial(_hook_workers, module) for module in _WORKERS}
    hooks |= {module: partial(_hook_engine, extend) for module, extend in _ENGINE.items()}
    for module, hook in hooks.items():
        if module not in _installed:  # several callers may wait for the same module
            _installed.add(module)
            after_import(module, hook)


def _hook_v0() -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl_patches.trainer_seams import hook_advantage

    hook_advantage()
    _replace(RayPPOTrainer, _correct_v0)


def _hook_v1() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    _replace(PPOTrainer, _correct_v1)


def _hook_groups() -> None:
    from ..worker.verl_workers import guard_groups

    guard_groups()


def _hook_workers(module: str) -> None:
    from ..delivery import checksums
    from ..worker import verl_workers

    worker = sys.modules[module].ActorRolloutRefWorker
    verl_workers.add_method(worker)
    checksums.add_method(worker)
    if module == _WORKERS[0]:
        verl_workers.seal_scores()


def _hook_engine(extend: str) -> None:
    from ..delivery import engine_side

    getattr(engine_side, extend)()


def _hook_client() -> None:
    from verl_patches.rollout_seams import note_fully_async_clients

    def note(client: Any) -> Any:
        from ..staleness.client import note_versions

        return note_versions(client)

    note_fully_async_clients(note)


def _replace(trainer: type, correct: Callable[[Any, Any], None]) -> None:
    """Make each new instance of ``trainer`` call ``correct(instance, config)``; the class is patched once."""
    if _MARK in vars(trainer):
        return

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        made: Any = object.__new__(cls)
        correct(made, _find_config([*args, *kwargs.values()]))
        return made

    trainer.__new__ = make  # type: ignore[method-assign,assignment]
    setattr(trainer, _MARK, "hooked")


def _find_config(given: Sequence[Any]) -> Any:
    """Find the configuration among a constructor's arguments; None if there is none."""
    from omegaconf import DictConfig

    return next((each for each in given if isinstance(each, DictConfig) and "trainer" in each), None)


def _is_ours(config: Any) -> bool:
    from omegaconf import OmegaConf

    return config is not None and OmegaConf.select(config, HOOKED, default=None) is not None


def _correct_v0(trainer: Any, config: Any) -> None:
    # Ray creates an actor before it calls __init__ with a configuration, and a fork may pass the configuration in
    # another form.
    if trains(type(trainer)) and (config is None or _is_ours(config)):
        from .corrected_run import choose_v0
        from .corrected_v0 import CorrectedV0

        _set_up()
        CorrectedV0(trainer, choose_v0)


def _correct_v1(trainer: Any, config: Any) -> None:
    if not _is_ours(config):
        return
    from verl_patches import trainer_seams

    from ..preflight.checks.path import demand_seams
    from .corrected_run import choose_v1
    from .corrected_v1 import CorrectedV1

    demand_seams(config)  # the trainer's constructor builds its replay buffer
    if config.trainer.v1.trainer_mode == "separate_async":
        trainer_seams.let_logger_flush()
    _set_up()
    CorrectedV1(trainer, choose_v1)


def _set_up() -> None:
    redact_streams()
    set_up_logger()


class _Redaction(logging.Filter):
    """Redacts every log record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact_text(record.getMessage()), ()
        return True


def set_up_logger() -> None:
    """Redact the logger's output, and add a handler if verl's logger has none. Idempotent."""
    if not any(isinstance(each, _Redaction) for each in logger.filters):
        logger.addFilter(_Redaction())
    if logging.getLogger("verl").handlers or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(os.environ.get(LEVEL, "INFO"))
    logger.propagate = False


def trains(trainer: type) -> bool:
    """Return False for a trainer class that only samples, such as ``FullyAsyncRollouter``."""
    return not any(each.__name__ == "FullyAsyncRollouter" for each in trainer.__mro__)


install()
