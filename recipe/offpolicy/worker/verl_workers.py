"""Additions to verl's workers and worker groups: a guard for ``update_actor``, a method for add-ons, and checksums.

The driver makes all gradient updates through ``update_actor`` of a worker group. A group that does not belong to a
corrected trainer rejects updates, because they would run without the correction and its proof.

Patched in verl: ``WorkerGroup._bind_worker_method``; ``ActorRolloutRefWorker``, whose ``actor`` is the inner worker
with the ``engine``, receives a method that worker groups find through ``register``; and, in verl 0.8.0 to 0.9.1,
``TrainingWorker.infer_batch(self, data: TensorDict)``, which ``ActorRolloutRefWorker`` calls on its ``actor`` and
``ref``. ``infer_batch`` returns "log_probs" over each row's prompt and response.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict

from verl.utils import tensordict_utils as tu

from ..batch.padding import Layout, flatten, pad_column
from ..batch.seals import key_of, seal_columns
from ..replay.batch_routes import ROUTES, hash_routes_by_row

Update = Callable[..., Any]


class GuardedUpdate:
    """Replacement for ``update_actor`` of a worker group; an unpickled copy does not belong to a trainer.

    Args:
        verls: verl's own method of the group.
        update: called with verl's method and the arguments; None if the group does not belong to a corrected trainer.
    """

    def __init__(self, verls: Update, update: Update | None = None) -> None:
        self.verls, self._update = verls, update

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._update is not None:
            return self._update(self.verls, *args, **kwargs)
        from ..proof.verify import LivenessError

        raise LivenessError(
            "update_actor was called on workers that do not belong to a corrected trainer, so this update would be "
            "uncorrected. The trainer of this program derives neither from verl's RayPPOTrainer nor from its V1 "
            "PPOTrainer, or creates its workers in an unsupported way."
        )

    def __reduce__(self) -> Any:
        return GuardedUpdate, (self.verls,)


def adopt(workers: Any, update: Callable[..., Any]) -> None:
    """Make ``update(verls, batch)`` run each update of the worker group ``workers``."""
    workers.update_actor = GuardedUpdate(getattr(workers.update_actor, "verls", workers.update_actor), update)


def guard_groups() -> None:
    """Make every worker group of this process reject updates until a corrected trainer adopts the group. Idempotent."""
    from verl.single_controller.base.worker_group import WorkerGroup

    bind = WorkerGroup._bind_worker_method
    if getattr(bind, "__offpolicy__", False):
        return

    def bind_guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = bind(self, *args, **kwargs)
        for name in names:
            if name == "update_actor" or name.endswith("_update_actor"):  # prefixed with the name of a colocated role
                setattr(self, name, GuardedUpdate(getattr(self, name)))
        return names

    bind_guarded.__offpolicy__ = True  # type: ignore[attr-defined]
    WorkerGroup._bind_worker_method = bind_guarded


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


_READ = ("prompts", "responses", "response_mask")
_MARK = "__offpolicy__"


def seal_scores() -> None:
    """Make each worker in this process add checksums (seals) of the log-probs that it computes. Idempotent."""
    from verl.workers.engine_workers import TrainingWorker

    scores = TrainingWorker.infer_batch
    if getattr(scores, _MARK, False):
        return

    @functools.wraps(scores)
    def infer_batch(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        # verl removes this entry from the batch. verl's dispatch passes only the rows' names; ``actor`` and ``ref``
        # receive the rows.
        is_rows = isinstance(data, TensorDict)
        of_reference = is_rows and (tu.get(data, "no_lora_adapter", False) or self.engine_config.forward_only)
        output = scores(self, data, *args, **kwargs)
        if is_rows and output is not None and "log_probs" in output.keys() and {*_READ} <= {*data.keys()}:
            name = "ref_log_prob" if of_reference else "old_log_probs"
            output[key_of(name)] = _seal(data, output["log_probs"])
        if is_rows and output is not None and ROUTES in output.keys():
            output[key_of(ROUTES)] = hash_routes_by_row(output[ROUTES])
        return output

    setattr(infer_batch, _MARK, True)
    TrainingWorker.infer_batch = infer_batch


def _seal(data: TensorDict, log_probs: Any) -> Any:
    # The rows on the host are used, because verl moves the result to the host.
    rows = data.select(*_READ, "attention_mask", strict=False).cpu()
    layout = Layout.of(rows)
    tokens, mask = (pad_column(rows[name], layout, name) for name in _READ[1:])
    (seal,) = seal_columns(tokens, mask, [layout.responses_of(flatten(log_probs))])
    return seal
