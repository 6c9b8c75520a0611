"""Contracts on verl's own calls that carry the correction to the loss in the engine path. Nothing is patched here.

The trainer hands a loss to the workers by ``set_loss_fn``, the engine calls it at each micro-batch, and it calls
verl's ``ppo_loss``, which multiplies ``rollout_is_weights`` into the policy term. The signatures are quoted from
the releases named, where they are the same, and checked before a run starts.
"""

from __future__ import annotations

from collections.abc import Iterable

from .contract import Contract, Key
from .releases import specifiers

RELEASES = specifiers(lambda release: True)
_WORKERS = "verl.workers.engine_workers"
_ALGORITHMS = "verl.trainer.ppo.core_algos"


def seam(
    name: str,
    target: str,
    signature: str | None,
    *,
    releases: str | tuple[str, ...] = RELEASES,
    keys: tuple[Key, ...] = (),
    names: tuple[str, ...] = (),
    option: str = "",
) -> Contract:
    """Build a contract on a function of verl that is called or overridden."""
    return Contract(name, target, signature, "verl", releases, keys, names, option)


SEAMS = (
    seam("set_loss_fn", f"{_WORKERS}:ActorRolloutRefWorker.set_loss_fn", "(self, loss_fn)"),
    seam("update_actor", f"{_WORKERS}:ActorRolloutRefWorker.update_actor", "(self, data)"),
    # By this key the loss knows an update's last mini-batch.
    seam(
        "train_mini_batch",
        f"{_WORKERS}:TrainingWorker.train_mini_batch",
        "(self, data)",
        keys=("update_lr_scheduler",),
    ),
    # Metrics that complete themselves before they are sent: see sent_metrics.
    seam(
        "_postprocess_output",
        f"{_WORKERS}:TrainingWorker._postprocess_output",
        "(self, output, *, global_token_num, delta_time, forward_only, images_seqlens)",
        keys=("metrics",),
    ),
    seam(
        "ppo_loss",
        "verl.workers.utils.losses:ppo_loss",
        "(config, model_output, data, dp_group=None)",
        keys=("response_mask", "old_log_probs", "advantages", "rollout_is_weights"),
    ),
    seam("kl_penalty", f"{_ALGORITHMS}:kl_penalty", "(logprob, ref_logprob, kl_penalty)"),
    seam(
        "agg_loss",
        f"{_ALGORITHMS}:agg_loss",
        "(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, "
        "loss_scale_factor=None)",
    ),
    seam("no_padding_2_padding", "verl.workers.utils.padding:no_padding_2_padding", "(tensor, data)"),
)
"""Every function of verl's workers that the engine path calls or is called by."""


def check(seams: Iterable[Contract] | None = None) -> None:
    """Check each seam against the installed verl; those of this module by default.

    Raises:
        PatchError: a seam has moved, or the release was not tested and that was not opted into.
    """
    for contract in SEAMS if seams is None else seams:
        contract.check()
