"""Timer of the correction's calls, in each process of a run that names this module.

verl imports it by VERL_USE_EXTERNAL_MODULES; ``run_share.py`` reads what it writes into OFFPOLICY_CALL_TIMES, a file a
process, a line a call. Calls within a noted call are not noted.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_patches.deferred import after_import

CALLS = {
    "worker.enter": "recipe.offpolicy.worker.metrics:Ledger.enter",
    "worker.leave": "recipe.offpolicy.worker.metrics:Ledger.leave",
    "driver.sampled": "recipe.offpolicy.trainer.supervision:Supervision.sampled",
    "driver.aligned": "recipe.offpolicy.trainer.supervision:Supervision.aligned",
    "driver.collect": "recipe.offpolicy.trainer.supervision:Supervision.collect",
    "driver.step_metrics": "recipe.offpolicy.trainer.supervision:Supervision.step_metrics",
    # With offpolicy.staleness.eta; the looks at TransferQueue that are not verl's own are in them.
    "staleness.issue": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer.count_prompts",
    "staleness.enough": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer._has_enough_samples",
    "staleness.evict": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer._terminal_eviction_reasons",
    "staleness.newest": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer.check_versions",
    "staleness.noted": "recipe.offpolicy.trainer.bounded_trainer:BoundedTrainer._check_noted",
    "staleness.ages": "recipe.offpolicy.trainer.bounded_trainer:BoundedTrainer._check_ages",
    "staleness.metrics": "recipe.offpolicy.staleness.tally:Tally.metrics",
    "staleness.client": "recipe.offpolicy.staleness.client:VersionedClient._find_row",
    "staleness.lay_out": "recipe.offpolicy.batch.micro_batch:read_versions",
}
_within = threading.local()


def note(name: str, function: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """Wrap ``function`` to append a line to ``file`` at each call."""

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if getattr(_within, "call", False):
            return function(*args, **kwargs)
        _within.call, start = True, time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds, _within.call = time.perf_counter() - start, False
            _write(file, name, seconds)

    return noted


def _write(file: Path, name: str, seconds: float) -> None:
    with file.open("a") as out:
        out.write(json.dumps({"name": name, "seconds": seconds}) + "\n")


def note_added_read(check: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """Wrap the check of a rollout to note what the limit's columns add to the read before it, by further reads.

    The first read of a batch takes longest and is not counted; the others come as ABBA, so that a drift cancels.
    """

    @functools.wraps(check)
    def noted(trainer: Any, batch: Any, rows: Any) -> Any:
        from recipe.offpolicy.proof.rollout_checks import SAMPLED
        from recipe.offpolicy.trainer.batch_view_v1 import read_columns

        def measure(names: tuple[str, ...]) -> float:
            start = time.perf_counter()
            read_columns(batch, *names)
            return time.perf_counter() - start

        with_limit = trainer._names_to_check
        measure(with_limit)
        with_, without, without_again, with_again = map(measure, (with_limit, SAMPLED, SAMPLED, with_limit))
        _write(file, "staleness.read", (with_ + with_again - without - without_again) / 2)
        return check(trainer, batch, rows)

    return noted


def install(folder: Path) -> None:
    """Time every call of ``CALLS`` in this process, once its module is imported."""
    file = folder / f"{os.getpid()}.jsonl"
    for name, target in CALLS.items():
        module, _, path = target.partition(":")
        after_import(module, functools.partial(_replace, module, path, functools.partial(note, name), file))
    module = "recipe.offpolicy.trainer.bounded_trainer"
    after_import(module, functools.partial(_replace, module, "BoundedTrainer._check_rollout", note_added_read, file))


def _replace(module: str, path: str, wrap: Callable[[Callable[..., Any], Path], Any], file: Path) -> None:
    owner, _, attribute = path.rpartition(".")
    found: Any = importlib.import_module(module)
    found = getattr(found, owner) if owner else found
    setattr(found, attribute, wrap(getattr(found, attribute), file))


if folder := os.environ.get("OFFPOLICY_CALL_TIMES"):
    install(Path(folder))
