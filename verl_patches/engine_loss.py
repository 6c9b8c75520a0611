"""The seam of the engine path: verl's own calls that carry the correction. Nothing is patched here.

The trainer hands a loss to the workers by ``set_loss_fn``, the engine calls it at each micro-batch, and it calls
verl's ``ppo_loss``, which multiplies ``rollout_is_weights`` into the policy term. The signatures are quoted from
verl 0.9.1 and checked before a run starts.
"""

from __future__ import annotations

from .contract import Contract

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_ALGORITHMS = "verl.trainer.ppo.core_algos"


def _seam(name: str, target: str, signature: str | None) -> Contract:
    return Contract(name=name, target=target, signature=signature, distribution="verl", releases="==0.9.1")


SEAMS = (
    _seam("set_loss_fn", "verl.workers.engine_workers:ActorRolloutRefWorker.set_loss_fn", "(self, loss_fn)"),
    _seam("update_actor", "verl.workers.engine_workers:ActorRolloutRefWorker.update_actor", "(self, data)"),
    _seam("train_mini_batch", "verl.workers.engine_workers:TrainingWorker.train_mini_batch", "(self, data)"),
    _seam("ppo_loss", "verl.workers.utils.losses:ppo_loss", "(config, model_output, data, dp_group=None)"),
    _seam("kl_penalty", f"{_ALGORITHMS}:kl_penalty", "(logprob, ref_logprob, kl_penalty)"),
    _seam(
        "agg_loss",
        f"{_ALGORITHMS}:agg_loss",
        "(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, "
        "loss_scale_factor=None)",
    ),
    _seam("no_padding_2_padding", "verl.workers.utils.padding:no_padding_2_padding", "(tensor, data)"),
    _seam("on_init_end", f"{_TRAINER}:PPOTrainer.on_init_end", "(self)"),
    _seam("_compute_old_log_prob", f"{_TRAINER}:PPOTrainer._compute_old_log_prob", "(self, batch, metrics)"),
    _seam("_compute_advantage", f"{_TRAINER}:PPOTrainer._compute_advantage", "(self, batch, metrics)"),
    _seam("_update_actor", f"{_TRAINER}:PPOTrainer._update_actor", "(self, batch, metrics)"),
    _seam("get_trainer_cls", f"{_TRAINER}:get_trainer_cls", "(name)"),
    _seam("TRAINER_REGISTRY", f"{_TRAINER}:TRAINER_REGISTRY", None),
    # Ray adds a parameter of its own to an actor's methods, so that the signature depends on Ray's release.
    _seam("TaskRunnerV1", "verl.trainer.main_ppo:TaskRunnerV1.__ray_metadata__.modified_class.run", None),
    _seam("run_ppo", "verl.trainer.main_ppo:run_ppo", "(config, task_runner_class)"),
)
"""Every function of verl that the engine path calls, overrides or is called by."""


def check() -> None:
    """Check each seam against the installed verl.

    Raises:
        PatchError: a seam has moved, or the release was not tested and that was not opted into.
    """
    for seam in SEAMS:
        seam.check()
