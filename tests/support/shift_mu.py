"""An external module for verl that shifts mu by one token before the worker trains on it: a fault to be caught."""

from __future__ import annotations

import functools
from typing import Any

from verl_patches.deferred import after_import


def _install() -> None:
    import torch

    from verl.workers.engine_workers import TrainingWorker

    original = TrainingWorker.train_mini_batch

    @functools.wraps(original)
    def train_mini_batch(self: Any, data: Any) -> Any:
        rows = [row.roll(1) for row in data["rollout_log_probs"].unbind()]
        data["rollout_log_probs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return original(self, data)

    TrainingWorker.train_mini_batch = train_mini_batch


after_import("verl.workers.engine_workers", _install)
