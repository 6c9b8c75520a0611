"""Measures start-up: the doctor, ``--check``, and a launch until it starts Ray, for two checkouts in turn.

    python scripts/benchmark/start_up.py REVISION [--pairs 5] [--script FILE] [override ...]

The script checks REVISION out into a temporary worktree. For each tool, it prints medians of CPU time (user and system,
of the process and its children) and of wall time, the median of the pairs' ratios, and whether both checkouts printed
the same. It also measures verl's own launch, without a correction, until the launch starts Ray. Compiled modules are
not kept, so that neither checkout benefits from earlier runs.
"""

from __future__ import annotations

import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.harness import add_counts, build_parser, find_median_ratio, format_markdown, format_row, take_turns

OVERRIDES = (
    "correction=[tis_token,gsm]",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)
UNTIL_RAY = """
import runpy, sys, ray, verl.utils.config
verl.utils.config.validate_config = lambda **given: None  # it reads a model
ray.init = lambda *args, **given: sys.exit(0)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Program that runs a launch and ends it when it is about to start Ray."""
_LOGGED = re.compile(r"\[\d{4}-\d\d-\d\d ")
"""Lines that packages log while they are imported, and that contain the time of day."""


class Run(NamedTuple):
    """One run of a tool: seconds of CPU time and of wall time, and what it printed."""

    cpu: float
    wall: float
    said: str


COLUMNS = ("tool", "CPU, s, other and this", "ratio", "wall, s, other and this", "ratio", "same output")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print a table."""
    parser = build_parser(__doc__)
    parser.add_argument("revision", help="of git, to compare this checkout with")
    add_counts(parser, pairs=5)
    parser.add_argument("--script", metavar="FILE", help="read by the doctor as well")
    parser.add_argument("overrides", nargs="*", default=OVERRIDES)
    known = parser.parse_intermixed_args(arguments)
    print("\n".join(format_markdown(COLUMNS, [])))
    with tempfile.TemporaryDirectory() as scratch:
        other, git = Path(scratch, "checkout"), ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), known.revision], check=True)
        try:
            for name, command in build_commands(known.overrides, known.script, scratch).items():
                sides = {"other": partial(run, other, command), "this": partial(run, ROOT, command)}
                print(format_row(describe(name, take_turns(sides, known.pairs, uncounted=0))), flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)


def build_commands(overrides: Sequence[str], script: str | None, scratch: str) -> dict[str, list[str]]:
    """Build the arguments of Python for each tool, by its name.

    Args:
        script: a launch script that the doctor reads in addition.
        scratch: folder for the Hydra outputs of a launch.
    """
    program, written = "recipe.offpolicy.main_offpolicy", f"hydra.run.dir='{scratch}/hydra'"
    verls = [each for each in overrides if "correction" not in each]
    tools = {
        "doctor": ["-m", "recipe.offpolicy.doctor", *overrides],
        "--check": ["-m", program, "--check", *overrides],
        "launch, until Ray": ["-c", UNTIL_RAY, program, written, *overrides],
        "verl's own": ["-c", UNTIL_RAY, "verl.trainer.main_ppo", written, *verls],
    }
    if script:
        tools["doctor --script"] = ["-m", "recipe.offpolicy.doctor", "--script", str(Path(script).resolve())]
    return tools


def run(checkout: Path, command: Sequence[str]) -> Run:
    """Run Python with these arguments in a checkout, in a separate process."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    said = done.stdout.replace(str(checkout), "").replace(str(ROOT), "")
    lines = [line for line in said.splitlines() if not _LOGGED.match(line)]
    return Run(cpu, wall, "\n".join([str(done.returncode), *lines]))


def describe(name: str, runs: Mapping[str, Sequence[Run]]) -> list[Any]:
    """Format the medians of both checkouts and of the pairs' ratios, and whether all runs printed the same."""
    cells = [name]
    for kind in ("cpu", "wall"):
        other, ours = ([getattr(each, kind) for each in runs[side]] for side in ("other", "this"))
        cells.append(f"{statistics.median(other):.1f} and {statistics.median(ours):.1f}")
        cells.append(f"{find_median_ratio(ours, other):.2f}")
    same = len({each.said for side in runs.values() for each in side}) == 1
    return [*cells, "yes" if same else "no"]


if __name__ == "__main__":
    main()
