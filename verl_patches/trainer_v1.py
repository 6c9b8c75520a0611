"""Contracts on verl's V1 trainers: methods that a corrected trainer overrides."""

from __future__ import annotations

from .engine_loss import Seams
from .releases import specifiers

_OWNER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_RELEASES = specifiers(lambda release: bool(release.v1_modes))
_trainer = Seams(_OWNER, _RELEASES)

SEAMS = (
    _trainer("init", "(self)", names=("_setup", "on_init_end")),
    _trainer("_setup", "(self)", names=("_load_checkpoint",)),
    _trainer("on_init_end", "(self)"),
    _trainer("fit", "(self, agent_loop_manager)", names=("step", "_save_checkpoint", "_validate")),
    _trainer("step", "(self, metrics, timing_raw)", names=("_step_once",)),
    _trainer("_step_once", names=("_compute_old_log_prob", "_compute_advantage", "_update_actor")),
    _trainer("_compute_old_log_prob", "(self, batch, metrics)", names=("actor_rollout_wg", "compute_log_prob")),
    _trainer("_compute_ref_log_prob", "(self, batch, metrics)"),
    _trainer("_compute_advantage", "(self, batch, metrics)"),
    _trainer("_update_actor", "(self, batch, metrics)", names=("actor_rollout_wg", "update_actor")),
    # This method sets the ranks of the actor's workers, from which the split of rows is read.
    _trainer("_balance_batch", names=("_dispatch_info",)),
    _trainer("_next_train_batch", "(self, num_prompts=None)"),
    _trainer("_add_batch_to_generate", names=("_next_train_batch",)),
    _trainer("_validate", "(self)", names=("_val_metrics_update",)),
    _trainer("_val_metrics_update", "(self, data_sources, sample_uids, reward_extra_infos_dict, ...)"),
    _trainer("_save_checkpoint", "(self)"),
    _trainer("_load_checkpoint", "(self)", names=("train_dataloader",)),
    Seams("verl.trainer.main_ppo", _RELEASES)("run_ppo", "(config, task_runner_class)"),
)

_OF_SNAPSHOTS = (specifiers(lambda release: release.token_versions), "offpolicy.late_weights.snapshots")
_worker = Seams("verl.experimental.separation.engine_workers:DetachActorWorker", *_OF_SNAPSHOTS)
SEAMS_OF_SNAPSHOTS = (
    Seams(_OWNER, *_OF_SNAPSHOTS)(
        "_init_resource_pool_mgr", "(self)", names=("role_worker_mapping", "ActorRolloutRefWorker")
    ),
    _worker("save_model_to_cpu", "(self, n)", names=("cpu_saved_models",)),
    _worker("restore_model_from_cpu", "(self, n)", names=("cpu_saved_models",)),
    _worker("clear_cpu_model", "(self, n)", names=("cpu_saved_models",)),
)
"""Functions on which a trainer that keeps snapshots of weights relies."""
