"""Contracts on verl's V1 trainers: methods that a corrected trainer overrides."""

from __future__ import annotations

from functools import partial

from .engine_loss import seam
from .releases import specifiers

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_seam = partial(seam, releases=specifiers(lambda release: bool(release.v1_modes)))

SEAMS = (
    _seam("init", f"{_TRAINER}:PPOTrainer.init", "(self)", names=("_setup", "on_init_end")),
    _seam("_setup", f"{_TRAINER}:PPOTrainer._setup", "(self)", names=("_load_checkpoint",)),
    _seam("on_init_end", f"{_TRAINER}:PPOTrainer.on_init_end", "(self)"),
    _seam(
        "fit",
        f"{_TRAINER}:PPOTrainer.fit",
        "(self, agent_loop_manager)",
        names=("step", "_save_checkpoint", "_validate"),
    ),
    _seam("step", f"{_TRAINER}:PPOTrainer.step", "(self, metrics, timing_raw)", names=("_step_once",)),
    _seam(
        "_step_once",
        f"{_TRAINER}:PPOTrainer._step_once",
        None,
        names=("_compute_old_log_prob", "_compute_advantage", "_update_actor"),
    ),
    _seam(
        "_compute_old_log_prob",
        f"{_TRAINER}:PPOTrainer._compute_old_log_prob",
        "(self, batch, metrics)",
        names=("actor_rollout_wg", "compute_log_prob"),
    ),
    _seam("_compute_advantage", f"{_TRAINER}:PPOTrainer._compute_advantage", "(self, batch, metrics)"),
    _seam(
        "_update_actor",
        f"{_TRAINER}:PPOTrainer._update_actor",
        "(self, batch, metrics)",
        names=("actor_rollout_wg", "update_actor"),
    ),
    # It notes the ranks of the actor's workers where the split of rows is read.
    _seam("_balance_batch", f"{_TRAINER}:PPOTrainer._balance_batch", None, names=("_dispatch_info",)),
    _seam("_next_train_batch", f"{_TRAINER}:PPOTrainer._next_train_batch", "(self, num_prompts=None)"),
    _seam(
        "_add_batch_to_generate",
        f"{_TRAINER}:PPOTrainer._add_batch_to_generate",
        None,
        names=("_next_train_batch",),
    ),
    _seam("_validate", f"{_TRAINER}:PPOTrainer._validate", "(self)", names=("_val_metrics_update",)),
    _seam(
        "_val_metrics_update",
        f"{_TRAINER}:PPOTrainer._val_metrics_update",
        "(self, data_sources, sample_uids, reward_extra_infos_dict, ...)",
    ),
    _seam("_save_checkpoint", f"{_TRAINER}:PPOTrainer._save_checkpoint", "(self)"),
    _seam("_load_checkpoint", f"{_TRAINER}:PPOTrainer._load_checkpoint", "(self)", names=("train_dataloader",)),
    _seam("run_ppo", "verl.trainer.main_ppo:run_ppo", "(config, task_runner_class)"),
)


_WORKER = "verl.experimental.separation.engine_workers:DetachActorWorker"
_of_snapshots = partial(
    seam, releases=specifiers(lambda release: release.token_versions), option="offpolicy.late_weights.snapshots"
)
SEAMS_OF_SNAPSHOTS = (
    _of_snapshots(
        "_init_resource_pool_mgr",
        f"{_TRAINER}:PPOTrainer._init_resource_pool_mgr",
        "(self)",
        names=("role_worker_mapping", "ActorRolloutRefWorker"),
    ),
    *(
        _of_snapshots(name, f"{_WORKER}.{name}", "(self, n)", names=("cpu_saved_models",))
        for name in ("save_model_to_cpu", "restore_model_from_cpu", "clear_cpu_model")
    ),
)
"""What a trainer that keeps weights relies on."""
