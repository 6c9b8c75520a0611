"""A method on verl's actor workers that lets a trainer install add-ons in the training engine.

It uses ``verl.workers.engine_workers.ActorRolloutRefWorker``, whose ``actor`` is the inner worker with the ``engine``,
and ``register(dispatch_mode=Dispatch.ONE_TO_ALL)``, which lets worker groups find the method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

EnginePart = Callable[[Any], object]
"""Function that is called with verl's actor worker after its model is initialised; it must be picklable."""


def install_offpolicy(self: Any, parts: Sequence[EnginePart]) -> None:
    """Install each part in this worker; all ranks must call this function together."""
    for part in parts:
        part(self)


def add_method(worker: type) -> None:
    """Add ``install_offpolicy`` to a class of verl's actor workers, in every process of a run."""
    from verl.single_controller.base.decorator import Dispatch, register

    method: Any = register(dispatch_mode=Dispatch.ONE_TO_ALL)(install_offpolicy)
    worker.install_offpolicy = method  # type: ignore[attr-defined]
