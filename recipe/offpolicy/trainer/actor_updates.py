"""``update_actor`` of verl's worker groups, through which the driver makes all gradient updates in every program.

A worker group that no corrected trainer has adopted refuses to update, because it would train without the correction
and without its proof.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Update = Callable[..., Any]


class UnadoptedUpdate:
    """Replacement for ``update_actor`` of a worker group that no corrected trainer has adopted.

    Args:
        verls: verl's own method of the group.
    """

    def __init__(self, verls: Update) -> None:
        self.verls = verls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from ..proof.verify import LivenessError

        raise LivenessError(
            "update_actor was called on workers that belong to no corrected trainer, so this update would be "
            "uncorrected. The trainer of this program derives neither from verl's RayPPOTrainer nor from its V1 "
            "PPOTrainer, or creates its workers in an unsupported way."
        )


class AdoptedUpdate:
    """Replacement for ``update_actor`` of an adopted worker group; it is unpickled as an ``UnadoptedUpdate``.

    Args:
        update: called with verl's own method and the arguments.
        verls: verl's own method of the group.
    """

    def __init__(self, update: Callable[..., Any], verls: Update) -> None:
        self._update, self.verls = update, verls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._update(self.verls, *args, **kwargs)

    def __reduce__(self) -> Any:
        return UnadoptedUpdate, (self.verls,)


def adopt(workers: Any, update: Callable[..., Any]) -> None:
    """Make ``update(verls, batch)`` run each update of the worker group ``workers``."""
    workers.update_actor = AdoptedUpdate(update, getattr(workers.update_actor, "verls", workers.update_actor))


def guard_groups() -> None:
    """Make every worker group of this process refuse updates until it is adopted. Idempotent."""
    from verl.single_controller.base.worker_group import WorkerGroup

    bind = WorkerGroup._bind_worker_method
    if getattr(bind, "__offpolicy__", False):
        return

    def bind_guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = bind(self, *args, **kwargs)
        for name in names:
            if name == "update_actor" or name.endswith("_update_actor"):  # prefixed with the name of a colocated role
                setattr(self, name, UnadoptedUpdate(getattr(self, name)))
        return names

    bind_guarded.__offpolicy__ = True  # type: ignore[attr-defined]
    WorkerGroup._bind_worker_method = bind_guarded
