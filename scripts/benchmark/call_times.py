"""Timer of the correction's calls, in each process of a run that names this module.

verl imports it by VERL_USE_EXTERNAL_MODULES; ``run_share.py`` reads what it writes into OFFPOLICY_CALL_TIMES, a file a
process, a line a call. Calls within a noted call are not noted.
"""

from __future__ import annotations

import functools
import json
import os
import pkgutil
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
    "seal.columns": "recipe.offpolicy.trainer.corrected_v1:CorrectedV1.seal",
    "seal.stored": "recipe.offpolicy.trainer.corrected_v1:CorrectedV1._seal_stored",
    "seal.scores": "recipe.offpolicy.worker.scored_seals:_seal",
    "seal.compare": "recipe.offpolicy.batch.micro_batch:check_seals",
    "driver.step_metrics": "recipe.offpolicy.trainer.supervision:Supervision.step_metrics",
    "proof.first": "recipe.offpolicy.worker.loss:prove",
    # With offpolicy.staleness.eta; the looks at TransferQueue that are not verl's own are in them.
    "staleness.issue": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer.count_prompts",
    "staleness.enough": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer._has_enough_samples",
    "staleness.evict": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer._terminal_eviction_reasons",
    "staleness.newest": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer.check_versions",
    "staleness.noted": "recipe.offpolicy.staleness.staleness_limit:StalenessLimit._check_noted",
    "staleness.ages": "recipe.offpolicy.staleness.staleness_limit:StalenessLimit._check_ages",
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
            with file.open("a") as out:
                out.write(json.dumps({"name": name, "seconds": seconds}) + "\n")

    return noted


def install(folder: Path) -> None:
    """Time every call of ``CALLS`` in this process, once its module is imported."""
    file = folder / f"{os.getpid()}.jsonl"
    for name, target in CALLS.items():
        after_import(target.partition(":")[0], functools.partial(_replace, name, target, file))


def _replace(name: str, target: str, file: Path) -> None:
    owner, _, attribute = target.replace(":", ".").rpartition(".")
    found = pkgutil.resolve_name(owner)
    setattr(found, attribute, note(name, getattr(found, attribute), file))


if folder := os.environ.get("OFFPOLICY_CALL_TIMES"):
    install(Path(folder))
