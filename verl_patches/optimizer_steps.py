"""Contracts on the optimizer step in verl's FSDP engine, two methods of which ``extensions.ess_lr`` wraps."""

from __future__ import annotations

from functools import partial

from .engine_loss import Seams
from .releases import specifiers

_of = partial(Seams, releases=specifiers(lambda release: release.scales_lr), option="ess_lr")
_engine = _of("verl.workers.engine.fsdp.transformer_impl:FSDPEngine")

SEAMS = (
    _of("verl.workers.engine.base:BaseEngine")(
        "train_batch", "(self, data, loss_function)", names=("forward_backward_batch", "optimizer_step")
    ),
    _engine("optimizer_step", "(self)", names=("optimizer", "step")),
    _engine("lr_scheduler_step", "(self)", names=("lr_scheduler", "get_last_lr")),
    _of("verl.workers.engine_workers:ActorRolloutRefWorker")(
        "init_model", name="init_model of the optimizer", names=("actor", "reset")
    ),
)
"""Parts of verl that ``recipe.offpolicy.extensions.ess_lr`` wraps or relies on."""
