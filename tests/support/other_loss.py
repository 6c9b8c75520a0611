"""An external module for verl whose actors keep verl's own loss whatever they receive; a fault that must be
detected.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from verl_patches.deferred import after_import


def _install() -> None:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.utils.losses import ppo_loss

    original = ActorRolloutRefWorker.set_loss_fn

    def set_loss_fn(self: Any, loss_fn: Any) -> Any:
        return original(self, partial(ppo_loss, config=omega_conf_to_dataclass(self.config.actor)))

    set_loss_fn.__dict__.update(original.__dict__)  # how verl dispatches it
    ActorRolloutRefWorker.set_loss_fn = set_loss_fn


after_import("verl.workers.engine_workers", _install)
