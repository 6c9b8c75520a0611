"""A method of verl's actor workers by which a trainer installs what acts in the engine that trains.

Seams: ``verl.workers.engine_workers.ActorRolloutRefWorker``, whose ``actor`` is the inner worker with that ``engine``,
and ``register(dispatch_mode=Dispatch.ONE_TO_ALL)``, by which worker groups find a method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

EnginePart = Callable[[Any], object]
"""Takes verl's actor worker, whose model is initialised; it is pickled."""


def install_offpolicy(self: Any, parts: Sequence[EnginePart]) -> None:
    """Install each part in this worker; all ranks do so together."""
    for part in parts:
        part(self)


def add_method(worker: type) -> None:
    """Give a class of verl's actor workers the method; in every process of a run."""
    from verl.single_controller.base.decorator import Dispatch, register

    method: Any = register(dispatch_mode=Dispatch.ONE_TO_ALL)(install_offpolicy)
    worker.install_offpolicy = method  # type: ignore[attr-defined]
