"""The seam of verl's V1 trainers: hooks that a subclass overrides, and the registry that the subclass goes into.

verl chooses buffers by the name of the mode, and takes any name but ``sync`` for asynchronous, so a mode of our own
would change the training: a corrected trainer takes the place of verl's under verl's own name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .engine_loss import seam

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_seam = partial(seam, releases="==0.9.1")

SEAMS = (
    _seam("on_init_end", f"{_TRAINER}:PPOTrainer.on_init_end", "(self)"),
    _seam("fit", f"{_TRAINER}:PPOTrainer.fit", "(self, agent_loop_manager)"),
    _seam("step", f"{_TRAINER}:PPOTrainer.step", "(self, metrics, timing_raw)"),
    _seam("_compute_old_log_prob", f"{_TRAINER}:PPOTrainer._compute_old_log_prob", "(self, batch, metrics)"),
    _seam("_compute_advantage", f"{_TRAINER}:PPOTrainer._compute_advantage", "(self, batch, metrics)"),
    _seam("_update_actor", f"{_TRAINER}:PPOTrainer._update_actor", "(self, batch, metrics)"),
    _seam("_save_checkpoint", f"{_TRAINER}:PPOTrainer._save_checkpoint", "(self)"),
    _seam("_load_checkpoint", f"{_TRAINER}:PPOTrainer._load_checkpoint", "(self)"),
    _seam("get_trainer_cls", f"{_TRAINER}:get_trainer_cls", "(name)"),
    _seam("TRAINER_REGISTRY", f"{_TRAINER}:TRAINER_REGISTRY", None),
    # Ray adds a parameter of its own to an actor's methods, so that the signature depends on Ray's release.
    _seam("TaskRunnerV1", "verl.trainer.main_ppo:TaskRunnerV1.__ray_metadata__.modified_class.run", None),
    _seam("run_ppo", "verl.trainer.main_ppo:run_ppo", "(config, task_runner_class)"),
)


def substitute(mode: str, subclass: Callable[[type], type]) -> None:
    """Put ``subclass(trainer)`` in the place of verl's trainer of this mode, in this process; once."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, get_trainer_cls

    trainer: Any = get_trainer_cls(mode)
    if not getattr(trainer, "__offpolicy__", False):
        replaced = subclass(trainer)
        replaced.__offpolicy__ = True  # type: ignore[attr-defined]
        TRAINER_REGISTRY[mode] = replaced
