"""Wrappers of ``core_algos`` in a legacy actor's module; in a corrected update the handover's ``Update`` is called.

Outside of such an update, and in every other module, the functions are verl's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..contract import Contract, wrap
from ..releases import specifiers
from .handover import Update

RELEASES = specifiers(lambda release: release.legacy_actors)
_RUNNING: ContextVar[Update | None] = ContextVar("offpolicy_legacy_update", default=None)
_SIGNATURES = {
    "get_policy_loss_fn": "(name)",
    "agg_loss": (
        "(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, "
        "loss_scale_factor=None)"
    ),
    "kl_penalty": "(logprob, ref_logprob, kl_penalty)",
}

METRICS = Contract(
    name="rollout_corr_metrics",
    target="verl.trainer.ppo.rollout_corr_helper:compute_rollout_corr_metrics_from_logprobs",
    signature="(log_prob, rollout_log_prob, response_mask)",
    distribution="verl",
    releases=RELEASES,
)


def running() -> Update | None:
    """Return the update under a handover that this process is running, or None."""
    return _RUNNING.get()


@contextmanager
def update(current: Update) -> Iterator[None]:
    """Let ``current`` handle the calls while an actor's update runs."""
    token = _RUNNING.set(current)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def contracts(module: str) -> tuple[Contract, ...]:
    """Build the contracts of the functions of ``verl.workers.actor.<module>`` that ``install`` wraps."""
    functions = (
        Contract(
            name=f"{module}.{function}",
            target=f"verl.workers.actor.{module}:{function}",
            signature=signature,
            distribution="verl",
            releases=RELEASES,
        )
        for function, signature in _SIGNATURES.items()
    )
    return (*functions, METRICS)


def install(module: str) -> None:
    """Wrap the functions of one actor's module. Idempotent.

    Raises:
        PatchError: a function has changed.
    """
    for contract in contracts(module):
        wrap(contract, _metrics if contract is METRICS else _answering(contract.target.rpartition(":")[2]))


def in_force(module: str) -> bool:
    """Return True if all of these functions are wrapped in this process."""
    return all(contract.in_force() for contract in contracts(module))


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
    """Compute verl's mismatch metrics; NaN on a micro-batch without response tokens, where verl raises."""
    if running() is None or response_mask.any():
        return original(log_prob, rollout_log_prob, response_mask)
    # The same keys, so that the ranks' metrics still match.
    return dict.fromkeys(original(log_prob, rollout_log_prob, response_mask.new_ones(response_mask.shape)), math.nan)
