"""Wrappers for functions that verl's legacy actors call: ``core_algos``, column selection, and logged methods.

The wrappers only act in an update whose batch contains a handover; otherwise, they call verl's own functions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from verl import DataProto

from ..contract import Contract, Seams
from ..releases import specifiers
from .handover import HANDOVER, PREFIX, LegacyHandover, Update


class Logged(Contract):
    """Contract on the signature and keys of a method without verl's logging decorator."""

    def _inspect(self, target: Any) -> Any:
        return behind(target, self.target.rpartition(".")[2])


def behind(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Unwrap a decorator that does not use ``functools.wraps``: return the decorated function with this name."""
    function = inspect.unwrap(function)
    # Such a decorator stores the wrapped function only in its closure.
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return next((found for found in (function, *held) if getattr(found, "__name__", None) == name), None)


ROLLOUT_LOG_PROBS = "rollout_log_probs"


class Carried(DataProto):
    """Batch whose ``select`` also returns mu and this package's columns."""

    def select(
        self,
        batch_keys: Any = None,
        non_tensor_batch_keys: Any = None,
        meta_info_keys: Any = None,
        deepcopy: bool = False,
    ) -> DataProto:
        if batch_keys is not None:
            ours = [key for key in self.batch.keys() if key.startswith(PREFIX) or key == ROLLOUT_LOG_PROBS]
            batch_keys = [*batch_keys, *(key for key in ours if key not in batch_keys)]
        return super().select(batch_keys, non_tensor_batch_keys, meta_info_keys, deepcopy)


def handover_of(data: DataProto) -> LegacyHandover | None:
    """Return the handover that the trainer has attached to this batch; None if there is none.

    Raises:
        KeyError: mu is needed, but the batch does not contain it.
    """
    handover: LegacyHandover | None = data.meta_info.get(HANDOVER)
    if handover is None:
        return None
    if handover.reads_rollout_log_probs and ROLLOUT_LOG_PROBS not in data.batch.keys():
        raise KeyError(
            f"{ROLLOUT_LOG_PROBS} is not in the batch that reached the actor, which contains "
            f"{', '.join(sorted(data.batch.keys()))}. Set actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    return handover


def carried(data: DataProto, **columns: Tensor) -> Carried:
    """Return a shallow copy of the batch with additional columns and without the handover."""
    batch = data.batch.copy()
    for key, column in columns.items():
        batch[key] = column
    meta_info = {key: value for key, value in data.meta_info.items() if key != HANDOVER}
    return Carried(batch=batch, non_tensor_batch=dict(data.non_tensor_batch), meta_info=meta_info)


RELEASES = specifiers(lambda release: release.legacy_actors)
_RUNNING: ContextVar[Update | None] = ContextVar("offpolicy_legacy_update", default=None)
_FUNCTIONS = (
    "get_policy_loss_fn(name)",
    "agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, "
    "loss_scale_factor=None)",
    "kl_penalty(logprob, ref_logprob, kl_penalty)",
)
METRICS = Seams("verl.trainer.ppo.rollout_corr_helper", RELEASES)(
    "compute_rollout_corr_metrics_from_logprobs(log_prob, rollout_log_prob, response_mask)", name="rollout_corr_metrics"
)


def running() -> Update | None:
    """Return the update with a handover that is currently running in this process; None if there is none."""
    return _RUNNING.get()


@contextmanager
def update(current: Update) -> Iterator[None]:
    """Make ``current`` handle the calls while an actor's update runs."""
    token = _RUNNING.set(current)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def list_wrappers(module: str) -> tuple[tuple[Contract, Callable[..., Any]], ...]:
    """List contracts on the functions that ``verl.workers.actor.<module>`` calls, with their wrappers."""
    functions = Seams(f"verl.workers.actor.{module}", RELEASES)
    names = [quoted.partition("(")[0] for quoted in _FUNCTIONS]
    ours = [
        (functions(quoted, name=f"{module}.{name}"), _answering(name))
        for quoted, name in zip(_FUNCTIONS, names, strict=True)
    ]
    return (*ours, (METRICS, _metrics))


def _answering(function: str) -> Callable[..., Any]:
    def answer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = running()
        if current is None:
            return original(*args, **kwargs)
        return getattr(current, function)(original, *args, **kwargs)

    return answer


def _metrics(
    original: Callable[..., dict[str, float]], log_prob: Any, rollout_log_prob: Any, response_mask: Any
) -> dict[str, float]:
    """Compute verl's mismatch metrics; NaN on a micro-batch without response tokens, for which verl raises an error."""
    if running() is None or response_mask.any():
        return original(log_prob, rollout_log_prob, response_mask)
    # The keys are the same on all ranks, so that their metrics can still be merged.
    return dict.fromkeys(original(log_prob, rollout_log_prob, response_mask.new_ones(response_mask.shape)), math.nan)
