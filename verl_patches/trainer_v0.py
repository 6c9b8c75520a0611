"""Contracts on verl's V0 trainer, ``RayPPOTrainer``: methods that a subclass overrides, and where it is put in.

``fit`` is one block that calls the module's own ``compute_advantage``, so what has to happen around the advantages
wraps that name. A trainer that verl builds past the replaced name is seen by its constructor. All changes are made in
the task runner's process alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from .contract import before, of_installed, wrap
from .engine_loss import seam
from .releases import specifiers

_TRAINER = "verl.trainer.ppo.ray_trainer"
_ADVANTAGE = seam(
    "compute_advantage",
    f"{_TRAINER}:compute_advantage",
    "(data, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=True, config=None)",
)

_RUN = ("RayPPOTrainer", "init_workers", "fit")
_TASK_RUNNER = of_installed(
    seam(
        "TaskRunner",
        "verl.trainer.main_ppo:TaskRunner.run",
        "(self, config)",
        releases=specifiers(lambda release: not release.v1_modes),
        names=_RUN,
    ),
    # Ray adds a parameter of its own to an actor's methods, so that the signature depends on Ray's release.
    seam(
        "TaskRunner",
        "verl.trainer.main_ppo_v0:TaskRunner.__ray_metadata__.modified_class.run",
        None,
        releases=specifiers(lambda release: bool(release.v1_modes)),
        names=_RUN,
    ),
)
# Its signature quotes a class of verl's, and whatever it takes is passed on.
_INIT = seam("RayPPOTrainer.__init__", f"{_TRAINER}:RayPPOTrainer.__init__", None)

SEAMS = (
    _TASK_RUNNER,
    _INIT,
    seam("init_workers", f"{_TRAINER}:RayPPOTrainer.init_workers", "(self)"),
    seam(
        "_compute_old_log_prob",
        f"{_TRAINER}:RayPPOTrainer._compute_old_log_prob",
        "(self, batch)",
        names=("actor_rollout_wg", "compute_log_prob"),
    ),
    seam(
        "_update_actor",
        f"{_TRAINER}:RayPPOTrainer._update_actor",
        "(self, batch)",
        names=("actor_rollout_wg", "update_actor"),
    ),
    seam(
        "fit",
        f"{_TRAINER}:RayPPOTrainer.fit",
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
    seam("_get_gen_batch", f"{_TRAINER}:RayPPOTrainer._get_gen_batch", "(self, batch)"),
    seam(
        "_validate",
        f"{_TRAINER}:RayPPOTrainer._validate",
        "(self, merged=False)",
        names=("_val_metrics_update",),
    ),
    seam(
        "_val_metrics_update",
        f"{_TRAINER}:RayPPOTrainer._val_metrics_update",
        "(self, data_sources, sample_uids, reward_extra_infos_dict, ...)",
    ),
    seam("_get_dp_size", f"{_TRAINER}:RayPPOTrainer._get_dp_size", "(self, worker_group, role)"),
    seam("_save_checkpoint", f"{_TRAINER}:RayPPOTrainer._save_checkpoint", "(self)"),
    seam("_load_checkpoint", f"{_TRAINER}:RayPPOTrainer._load_checkpoint", "(self)", names=("train_dataloader",)),
    _ADVANTAGE,
)

_around: list[Callable[..., Any]] = []


def home() -> str:
    """Return the module of the V0 task runner in the installed release, and the trainer's name that it reads."""
    v0 = "verl.trainer.main_ppo_v0"
    return v0 if importlib.util.find_spec(v0) else "verl.trainer.main_ppo"


def task_runner() -> Any:
    """Return verl's V0 TaskRunner, as the plain class that it is before Ray wraps it."""
    runner = importlib.import_module(home()).TaskRunner
    # Ray wraps a class into an actor class that cannot be subclassed; the class itself is kept in its metadata.
    metadata = getattr(runner, "__ray_metadata__", None)
    return metadata.modified_class if metadata else runner


def substitute(subclass: Callable[[type], type]) -> None:
    """Put ``subclass(RayPPOTrainer)`` where the task runner looks the trainer up, in this process; once."""
    module: Any = importlib.import_module(home())
    trainer = module.RayPPOTrainer
    # A second call in this process would subclass our own subclass.
    if not getattr(trainer, "__offpolicy__", False):
        replaced: Any = subclass(trainer)
        replaced.__offpolicy__ = True
        module.RayPPOTrainer = replaced


def before_any(look: Callable[[Any], None]) -> None:
    """Call ``look(trainer)`` for each trainer that is built in this process, before its constructor runs."""
    before(_INIT, look)


def plain_advantage() -> Callable[..., Any]:
    """Return verl's own ``compute_advantage``, which both trainers call, without what ``around_advantage`` wraps."""
    found: Callable[..., Any] = inspect.unwrap(importlib.import_module(_TRAINER).compute_advantage)
    return found


def around_advantage(hook: Callable[..., Any]) -> None:
    """Run ``hook(compute, data, *args, **kwargs)`` in the place of ``compute_advantage``; the last one given."""
    # In place: the function is wrapped once, and a later trainer's hook takes the place of the former one.
    _around[:] = [hook]
    wrap(_ADVANTAGE, lambda original, *args, **kwargs: _around[-1](original, *args, **kwargs))
