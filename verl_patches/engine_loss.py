"""Contracts on verl's own calls that pass the correction to the loss in the engine path. Nothing is patched here.

The trainer sends a loss to the workers by ``set_loss_fn``, and the engine calls this loss on each micro-batch. The loss
calls verl's ``ppo_loss``, which multiplies the policy term by ``rollout_is_weights``. The signatures are quoted from
the named releases, in all of which they are the same. They are checked before a run starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .contract import Contract, Key
from .releases import specifiers

RELEASES = specifiers(lambda release: True)


@dataclass(frozen=True)
class Seams:
    """Factory of contracts on those attributes of one module or class of verl that a run calls or overrides.

    Attributes:
        owner: "module" or "module:Class".
        releases, option: the same fields of each contract.
    """

    owner: str
    releases: tuple[str, ...] = RELEASES
    option: str = ""

    def __call__(
        self,
        attribute: str,
        signature: str | None = None,
        *,
        name: str = "",
        keys: tuple[Key, ...] = (),
        names: tuple[str, ...] = (),
    ) -> Contract:
        """Build the contract on an attribute; it has the attribute's name unless another name is given."""
        target = f"{self.owner}{'.' if ':' in self.owner else ':'}{attribute}"
        return Contract(name or attribute, target, signature, "verl", self.releases, keys, names, self.option)


_worker = Seams("verl.workers.engine_workers:ActorRolloutRefWorker")
_training_worker = Seams("verl.workers.engine_workers:TrainingWorker")
_algorithm = Seams("verl.trainer.ppo.core_algos")
POSTPROCESS_OUTPUT = _training_worker(
    "_postprocess_output",
    "(self, output, *, global_token_num, delta_time, forward_only, images_seqlens)",
    keys=("metrics",),
)

SEAMS = (
    _worker("set_loss_fn", "(self, loss_fn)"),
    _worker("update_actor", "(self, data)"),
    # This key tells the loss which mini-batch is the last of an update.
    _training_worker("train_mini_batch", "(self, data)", keys=("update_lr_scheduler",)),
    # Metrics that complete themselves before they are sent, see sent_metrics.
    POSTPROCESS_OUTPUT,
    Seams("verl.workers.utils.losses")(
        "ppo_loss",
        "(config, model_output, data, dp_group=None)",
        keys=("response_mask", "old_log_probs", "advantages", "rollout_is_weights"),
    ),
    _algorithm("kl_penalty", "(logprob, ref_logprob, kl_penalty)"),
    _algorithm(
        "agg_loss",
        "(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, "
        "loss_scale_factor=None)",
    ),
    Seams("verl.workers.utils.padding")("no_padding_2_padding", "(tensor, data)"),
)
"""All functions of verl's workers that the engine path calls, or that call the engine path."""


def check(seams: Iterable[Contract] | None = None) -> None:
    """Check each contract against the installed verl; by default, the contracts are those of this module.

    Raises:
        PatchError: a function has moved, or the release was not tested and untested releases are not allowed.
    """
    for contract in SEAMS if seams is None else seams:
        contract.check()
