"""Measures the share of a step that statistics and the recorder take in the quickstart with Ray, FSDP2 and vLLM.

    python scripts/benchmark/run_share.py [--steps 8] [hydra overrides]

The statistics' share is the wall time that the worker's training thread takes to measure and fetch them, and that the
driver takes to merge them, including the checks that each batch has arrived. The recorder's share is the time that it
reports, ``offpolicy/record/seconds``. The seals' share is the time that it takes to compute these checksums of columns,
in worker and driver, and to compare them in the loss. All shares are relative to ``timing_s/step``, summed over all
steps except the first. The first proof is relative to that step's ``timing_s/update_actor``. With
``+mode=separate_async_cpu offpolicy.staleness.eta=2``, the staleness limit is measured too: issue, buffer, checks,
layout of chunks and metrics, over all steps.

verl also imports this module in each process of the run, by VERL_USE_EXTERNAL_MODULES. There it times the calls in
``CALLS`` and writes the times under OFFPOLICY_CALL_TIMES, with one file per process and one line per call; calls within
a timed call are not recorded.
"""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from scripts.harness import build_parser, list_updates, run_quickstart
from verl_patches.deferred import after_import

PROOF = "proof.first"
CALLS = {
    "worker.enter": "recipe.offpolicy.worker.metrics:Ledger.enter",
    "worker.leave": "recipe.offpolicy.worker.metrics:Ledger.leave",
    "driver.sampled": "recipe.offpolicy.trainer.supervision:Supervision.sampled",
    "driver.aligned": "recipe.offpolicy.trainer.supervision:Supervision.aligned",
    "driver.collect": "recipe.offpolicy.trainer.supervision:Supervision.collect",
    "seal.columns": "recipe.offpolicy.trainer.corrected_v1:CorrectedV1.seal",
    "seal.stored": "recipe.offpolicy.trainer.corrected_v1:CorrectedV1._seal_stored",
    "seal.scores": "recipe.offpolicy.worker.verl_workers:_seal",
    "seal.compare": "recipe.offpolicy.batch.micro_batch:check_seals",
    "driver.step_metrics": "recipe.offpolicy.trainer.supervision:Supervision.step_metrics",
    "proof.first": "recipe.offpolicy.worker.loss:prove",
    # These functions are called with offpolicy.staleness.eta; their times include the reads of TransferQueue that verl
    # itself would not make.
    "staleness.issue": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer.count_prompts",
    "staleness.enough": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer._has_enough_samples",
    "staleness.evict": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer._terminal_eviction_reasons",
    "staleness.newest": "recipe.offpolicy.staleness.buffer:BoundedReplayBuffer.check_versions",
    "staleness.noted": "recipe.offpolicy.staleness.staleness_limit:StalenessLimit._check_noted",
    "staleness.ages": "recipe.offpolicy.staleness.staleness_limit:StalenessLimit._check_ages",
    "staleness.metrics": "recipe.offpolicy.staleness.buffer:Tally.metrics",
    "staleness.client": "recipe.offpolicy.staleness.client:RowNotes.find",
    "staleness.lay_out": "recipe.offpolicy.batch.micro_batch:read_versions",
    "staleness.find": "recipe.offpolicy.trainer.corrected_v1:find_token_versions",
}
_within = threading.local()


def run(steps: int, overrides: Sequence[str], seen: Path) -> list[dict[str, float]]:
    """Run one quickstart that logs call times to ``seen``; return the metrics of each step."""
    environment = {
        "OFFPOLICY_CALL_TIMES": str(seen),
        "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu,run_share",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    own = [f"trainer.total_training_steps={steps}", f"offpolicy.record.dir='{seen / 'recording'}'"]
    ended = run_quickstart([*own, *overrides], seen / "quickstart.log", environment=environment)
    # Status 3 means that the score has not risen, which may happen in so few steps.
    if ended.code not in (0, 3) or ended.folder is None:
        raise SystemExit(f"the quickstart failed:\n{ended.said[-6000:]}")
    return list_updates(ended.records)


def read_calls(seen: Path) -> list[dict[str, Any]]:
    """Read the calls logged in ``seen``."""
    return [json.loads(line) for file in sorted(seen.glob("*.jsonl")) for line in file.read_text().splitlines()]


def compute_shares(metrics: Sequence[Mapping[str, float]], calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute seconds per step, and their shares of the step's duration, ignoring the first step.

    Args:
        metrics: metrics of each step.
        calls: ``name`` and ``seconds`` of each call, in the order of the calls; except for the first proof and the
            staleness limit, each name occurs equally often in every step.
    """
    steps, by_name = len(metrics), dict[str, list[float]]()
    for call in calls:
        by_name.setdefault(call["name"], []).append(call["seconds"])
    proof = sum(by_name.pop(PROOF, []))
    limit = {name: sum(found) / steps for name, found in sorted(by_name.items()) if name.startswith("staleness")}
    spent = dict.fromkeys(("worker", "driver", "seal"), 0.0)
    for name in by_name.keys() - limit:
        found = by_name[name]
        spent[name.partition(".")[0]] += sum(found[len(found) // steps :])
    spent["recorder"] = sum(one["offpolicy/record/seconds"] for one in metrics[1:])
    whole = sum(one["timing_s/step"] for one in metrics[1:])
    return {
        **limit,
        "steps": steps,
        "step_seconds": whole / (steps - 1),
        **{f"{part}_seconds": spent[part] / (steps - 1) for part in ("worker", "driver", "recorder", "seal")},
        "statistics_share": (spent["worker"] + spent["driver"]) / whole,
        "recorder_share": spent["recorder"] / whole,
        "seal_share": spent["seal"] / whole,
        "proof_seconds": proof,
        "proof_share": proof / metrics[0]["timing_s/update_actor"],
        "staleness_seconds": sum(limit.values()),
        "staleness_share": steps * sum(limit.values()) / sum(one["timing_s/step"] for one in metrics),
    }


def format_figures(found: Mapping[str, float]) -> str:
    """Format the figures as text."""
    ms = {name.removesuffix("_seconds"): f"{1e3 * seconds:.1f}" for name, seconds in found.items()}
    share = {name.removesuffix("_share"): f"{each:.2%}".replace("%", " % of a step") for name, each in found.items()}
    lines = [
        f"{found['steps']:.0f} steps, without the first {found['step_seconds']:.2f} s each",
        f"statistics: {ms['worker']} ms in the worker and {ms['driver']} ms in the driver, {share['statistics']}",
        f"recorder: {ms['recorder']} ms, {share['recorder']}",
        f"seals: {ms['seal']} ms, {share['seal']}",
        f"first proof: {1e3 * found['proof_seconds']:.0f} ms, {100 * found['proof_share']:.0f} % of its update",
    ]
    if calls := [f"{name.partition('.')[2]} {ms[name]}" for name in found if name.startswith("staleness.")]:
        limit = f"limit of staleness: {ms['staleness']} ms, {share['staleness']}"
        lines.append(f"{limit}, the first included ({', '.join(calls)})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="2 or more")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides")
    given = parser.parse_args(arguments)
    if given.steps < 2:
        parser.error(f"--steps: {given.steps}: give 2 or more, because the first step is left out")
    with tempfile.TemporaryDirectory() as folder:
        metrics = run(given.steps, given.overrides, Path(folder))
        print(format_figures(compute_shares(metrics, read_calls(Path(folder)))))


# --- code that runs in a process of the run


def note(name: str, function: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """Wrap ``function`` so that it appends a line to ``file`` at each call."""

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
    """Time every call of ``CALLS`` in this process, as soon as its module is imported."""
    file = folder / f"{os.getpid()}.jsonl"
    for name, target in CALLS.items():
        after_import(target.partition(":")[0], functools.partial(_replace, name, target, file))


def _replace(name: str, target: str, file: Path) -> None:
    owner, _, attribute = target.replace(":", ".").rpartition(".")
    found = pkgutil.resolve_name(owner)
    setattr(found, attribute, note(name, getattr(found, attribute), file))


if __name__ == "__main__":
    main()
elif seen := os.environ.get("OFFPOLICY_CALL_TIMES"):
    install(Path(seen))
