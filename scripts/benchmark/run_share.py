"""Share of a step that statistics and the recorder take in a real run: the quickstart with Ray, FSDP2 and vLLM.

    python scripts/benchmark/run_share.py [--steps 8] [--json FILE] [hydra overrides]
    python scripts/benchmark/run_share.py --pairs 10 --out FILE [--preset no_forward]     # see paired_runs.py

Statistics: wall seconds of the training thread in measuring and fetching them, in the worker, and of the driver in
taking them in, with the checks that each batch arrived. The recorder: what it says of itself,
``offpolicy/record/seconds``. Seals: making them, in worker and driver, and comparing them in the loss. All are over
``timing_s/step``, summed over all steps but the first. The first proof is over that step's ``timing_s/update_actor``.
With ``+mode=separate_async_cpu offpolicy.staleness.eta=2``, the limit of staleness: issue, buffer, checks, laying out
of chunks and metrics, over all steps.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from scripts.benchmark.timing import build_parser, write_json
from scripts.harness import list_updates, run_quickstart

PROOF = "proof.first"


def run(steps: int, overrides: Sequence[str], seen: Path) -> list[dict[str, float]]:
    """Run one quickstart that logs call times to ``seen``; return the metrics of each step."""
    environment = {
        "OFFPOLICY_CALL_TIMES": str(seen),
        "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu,call_times",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    own = [f"trainer.total_training_steps={steps}", f"offpolicy.record.dir='{seen / 'recording'}'"]
    ended = run_quickstart([*own, *overrides], seen / "quickstart.log", environment=environment)
    # 3: the score has not risen, which it may not in so few steps.
    if ended.code not in (0, 3) or ended.folder is None:
        raise SystemExit(f"the quickstart failed:\n{ended.said[-6000:]}")
    return list_updates(ended.records)


def read_calls(seen: Path) -> list[dict[str, Any]]:
    """Read the calls logged in ``seen``."""
    return [json.loads(line) for file in sorted(seen.glob("*.jsonl")) for line in file.read_text().splitlines()]


def compute_shares(metrics: Sequence[Mapping[str, float]], calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute seconds a step and shares of it, without the first step.

    Args:
        metrics: of each step.
        calls: ``name`` and ``seconds`` of each call, in the order of their names' calls; each name comes equally often
            in every step, apart from the first proof's and those of the limit of staleness.
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
    by_call = ", ".join(
        f"{name.partition('.')[2]} {1e3 * seconds:.1f}"
        for name, seconds in found.items()
        if name.startswith("staleness.")
    )
    limit = (
        f"\nlimit of staleness: {1e3 * found['staleness_seconds']:.1f} ms, {100 * found['staleness_share']:.2f} % of a "
        f"step, the first included ({by_call})"
    )
    return (
        f"{found['steps']:.0f} steps, without the first {found['step_seconds']:.2f} s each\n"
        f"statistics: {1e3 * found['worker_seconds']:.1f} ms in the worker and {1e3 * found['driver_seconds']:.1f} ms "
        f"in the driver, {100 * found['statistics_share']:.2f} % of a step\n"
        f"recorder: {1e3 * found['recorder_seconds']:.1f} ms, {100 * found['recorder_share']:.2f} % of a step\n"
        f"seals: {1e3 * found['seal_seconds']:.1f} ms, {100 * found['seal_share']:.2f} % of a step\n"
        f"first proof: {1e3 * found['proof_seconds']:.0f} ms, {100 * found['proof_share']:.0f} % of its update"
        f"{limit if by_call else ''}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if any(word.partition("=")[0] == "--pairs" for word in words):
        from scripts.benchmark.paired_runs import main as run_pairs

        sys.exit(run_pairs(words))
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="2 or more")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides")
    given = parser.parse_args(words)
    if given.steps < 2:
        parser.error(f"--steps: {given.steps}: give 2 or more, the first is left out")
    with tempfile.TemporaryDirectory() as folder:
        metrics = run(given.steps, given.overrides, Path(folder))
        found = compute_shares(metrics, read_calls(Path(folder)))
    print(format_figures(found))
    write_json(given.json, found)


if __name__ == "__main__":
    main()
