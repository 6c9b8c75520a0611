"""Compares whole runs, corrected and with verl's own programs, in pairs: ratio of step times, and extra start-up time.

    python scripts/benchmark/paired_runs.py --out pairs.jsonl [--pairs 10] [--steps 20] [--preset forward] [overrides]
    python scripts/benchmark/paired_runs.py --out pairs.jsonl --against offpolicy.delivery.probe=null

Both runs of a pair are the quickstart's training, with the same seeds, keys and model: one is started as this package's
main_offpolicy, the other as verl's own main_ppo, with nothing from this package except the patches that let verl run on
a CPU. The two sides take turns, and the side that runs first alternates. With --against, the other run is corrected as
well, with the given override, and is printed under verl's name. Presets:

  forward      the unchanged quickstart: corrections that keep verl's forward pass for pi_old, two mini-batches
  no_forward   correction=gsm on one mini-batch of the whole batch, where correction.proximal=auto skips that pass, with
               a Qwen2 of 50 M parameters and random weights

The step time of a run is its median ``timing_s/step``, without the first step; the output shows the geometric mean of
the pairs' ratios. The start time is the number of seconds from the command to the end of the first step; the output
shows the mean of the pairs' differences. Phases that verl times, such as ``gen`` and ``update_actor``, are compared as
differences of medians. All intervals are 95 % intervals by Student's t over the pairs. Each run that has ended adds a
line to --out. A run that fails, or takes longer than --limit seconds, is ended with all its processes, and the call
stops.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    sys.exit(print(__doc__))

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.harness import UPDATED, add_counts, build_parser, format_markdown
from scripts.quickstart import options
from scripts.quickstart import prepare as cache
from scripts.quickstart.processes import Child, SharedMemoryWatch, StageFailed, Tail, become_subreaper, clean_up
from verl_patches.contract import demand_release

OUTPUTS = ROOT / "outputs"
LOOK = 0.1
"""Seconds between reads of a run's metrics."""
TIMED = "timing_s/"
STEP = f"{TIMED}step"
LARGE: dict[str, Any] = dict(
    num_hidden_layers=12, hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=8
)
"""Shape of a Qwen2 of 50 M parameters."""
COLUMNS = ("pair", "verl's step, s", "corrected, s", "ratio", "verl's start, s", "corrected, s")
SIDES = ("verl", "corrected")
STUDENT_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Quantile of Student's t at 0.975 for 1, 2, ... degrees of freedom; for more than 20, the value for 20 is used."""


class Preset(NamedTuple):
    """Two kinds of runs to compare.

    Attributes:
        corrected: overrides of the corrected run alone.
        both: overrides of both runs.
        large: whether to train a model of shape ``LARGE`` instead of the quickstart's model.
    """

    corrected: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    large: bool = False


PRESETS = {
    "forward": Preset(),
    "no_forward": Preset(
        corrected=("correction=gsm",),
        both=(
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n=6",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=24",
            "actor_rollout_ref.actor.optim.lr=1e-5",
        ),
        large=True,
    ),
}


class Run(NamedTuple):
    """A run that has finished.

    Attributes:
        start: seconds from the command to the end of the first step.
        seconds: ``timing_s/step`` of each step.
        phases: medians of the other ``timing_s/...`` metrics that verl logs, by the name after the slash, without the
            first step.
    """

    start: float
    seconds: list[float]
    phases: dict[str, float]


def build_command(
    side: str, preset: Preset, pair: int, scratch: Path, overrides: Sequence[str], against: Sequence[str] = ()
) -> list[str]:
    """Build the command of a run, without data and model.

    Args:
        scratch: folder of the run.
        overrides: the user's overrides for both runs; they come last.
        against: additional overrides of the other run, which is then also corrected; if empty, the other run is verl's
            own.
    """
    corrected = side == "corrected" or bool(against)
    if corrected:
        program = ["recipe.offpolicy.main_offpolicy"]
    else:
        program = ["verl.trainer.main_ppo", "--config-path", str(options.CONFIGS)]
    return [
        *(sys.executable, "-m", *program, "--config-name", "quickstart"),
        options.quote("hydra.run.dir", scratch / "hydra"),
        options.quote("reward.custom_reward_function.path", ROOT / "scripts" / "quickstart" / "reward.py"),
        *options.build_release_overrides("cpu", demand_release()),
        # Held-out questions are left out, because answering them is the same work in both runs.
        *("trainer.val_before_train=false", "trainer.test_freq=-1"),
        *(f"data.seed={pair}", f"actor_rollout_ref.rollout.seed={pair}"),
        *preset.both,
        *(preset.corrected if corrected else ()),
        *(() if side == "corrected" else against),
        *overrides,
    ]


def follow(command: Sequence[str], scratch: Path, limit: float) -> Run:
    """Run a command until it ends.

    Raises:
        SystemExit: the command failed, or took longer than ``limit`` seconds; the message contains the end of its log.
    """
    metrics = scratch / "metrics.jsonl"
    env = options.build_child_environment(os.environ, "cpu", ROOT)
    env |= {"TMPDIR": str(scratch), "RAY_TMPDIR": str(scratch), "VERL_FILE_LOGGER_PATH": str(metrics)}
    memory, tail, began = SharedMemoryWatch(), Tail(metrics), time.monotonic()
    steps: list[tuple[float, dict[str, float]]] = []
    child = Child(command, env, scratch / "run.log", ROOT)

    def look() -> None:
        now = time.monotonic() - began
        logged = [json.loads(line)["data"] for line in tail.new_lines()]
        steps.extend((now, data) for data in logged if UPDATED in data)
        memory.observe(every=2.0)
        if now > limit and child.process.poll() is None:
            sys.exit(f"a run took longer than {limit:.0f} s:\n{child.end_of_log(30)}")

    try:
        for _ in child.lines(look, LOOK):
            pass
    except StageFailed:
        sys.exit(f"a run ended with {child.process.returncode}:\n{child.end_of_log(30)}")
    finally:
        clean_up(memory)
    (start, _), *later = steps
    names = [name for name in later[-1][1] if name.startswith(TIMED) and name != STEP]
    phases = {name: statistics.median(step.get(name, 0.0) for _, step in later) for name in names}
    return Run(start, [step[STEP] for _, step in steps], {k.removeprefix(TIMED): v for k, v in phases.items()})


def prepare(preset: Preset) -> list[str]:
    """Make data and model if they are missing; return the overrides that select them."""
    folder, parts = OUTPUTS / "quickstart" / "cache", ["data", "model"]
    data, model = (cache.find_made(folder, parts) or cache.prepare(folder, parts)).values()
    if preset.large:
        source, model = model, OUTPUTS / "benchmark_pairs" / f"qwen2-50m-{model.name.removeprefix('model-')}"

        def build(draft: Path) -> None:
            from transformers import AutoTokenizer

            from scripts.quickstart.model import build_model

            tokenizer = AutoTokenizer.from_pretrained(source)
            build_model(tokenizer, **LARGE).save_pretrained(draft)
            tokenizer.save_pretrained(draft)

        cache.make_once(model, build)
    files = {"data.train_files": data / "train.parquet", "data.val_files": data / "heldout.parquet"}
    return [options.quote(*each) for each in (files | {options.MODEL_PATH: model}).items()]


def compute_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Compute the mean of independent values and its 95 % interval by Student's t, NaN for a single value.

    Example:
        >>> compute_interval([1.0, 3.0])  # 12.706 standard errors of 1
        (2.0, -10.706, 14.706)
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, math.nan, math.nan
    half = STUDENT_975[min(count - 1, len(STUDENT_975)) - 1] * statistics.stdev(values) / math.sqrt(count)
    return mean, mean - half, mean + half


def format_result(pairs: Sequence[tuple[Run, Run]]) -> str:
    """Format a row for each pair (verl's run, corrected run), and the comparison of all pairs.

    Step times are compared by the geometric mean of their ratios, others by their mean difference. Phases are shown if
    they take at least 1 % of a step; a phase that one side lacks counts as 0.
    """
    steps = [[statistics.median(run.seconds[1:]) for run in pair] for pair in pairs]
    rows = [
        (number, f"{one:.3f}", f"{other:.3f}", f"{other / one:.3f}", f"{a.start:.1f}", f"{b.start:.1f}")
        for number, ((a, b), (one, other)) in enumerate(zip(pairs, steps, strict=True), 1)
    ]
    ratio = map(math.exp, compute_interval([math.log(other / one) for one, other in steps]))
    start = compute_interval([b.start - a.start for a, b in pairs])
    lines = [
        *format_markdown(COLUMNS, rows),
        "step, corrected over verl's own: {:.3f} ({:.3f} to {:.3f})".format(*ratio),
        "start to the end of the first step: {:+.1f} s ({:+.1f} to {:+.1f})".format(*start),
    ]
    least = 0.01 * statistics.fmean(one for one, _ in steps)
    for name in sorted({name for pair in pairs for run in pair for name in run.phases}):
        seconds = [[run.phases.get(name, 0.0) for run in pair] for pair in pairs]
        verl, more = statistics.fmean(one for one, _ in seconds), compute_interval([b - a for a, b in seconds])
        if max(verl, verl + more[0]) >= least:
            lines.append(f"{name}: verl's {verl:.3f} s, " + "corrected {:+.3f} s ({:+.3f} to {:+.3f})".format(*more))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON, a line a run")
    add_counts(parser, pairs=10, steps=20)
    parser.add_argument("--preset", choices=PRESETS, default="forward")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds of a run")
    parser.add_argument("--against", action="append", default=[], metavar="OVERRIDE", help="of the other run")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of both runs")
    given = parser.parse_args(arguments)
    become_subreaper()
    # The signal is converted to an exception, so that the processes that a run has started are ended.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    preset, pairs = PRESETS[given.preset], []
    overrides = [*given.overrides, f"trainer.total_training_steps={given.steps}", *prepare(preset)]
    for pair in range(1, given.pairs + 1):
        runs = {}
        for side in SIDES[:: 1 if pair % 2 else -1]:  # the side that runs first alternates
            print(f"pair {pair} of {given.pairs}, {side}", file=sys.stderr, flush=True)
            # Ray's sockets are deep below this folder, and the path of a socket must be shorter than 108 characters.
            with tempfile.TemporaryDirectory(prefix="pr", dir="/tmp", ignore_cleanup_errors=True) as scratch:
                command = build_command(side, preset, pair, Path(scratch), overrides, given.against)
                runs[side] = follow(command, Path(scratch), given.limit)
            with given.out.open("a") as file:
                file.write(json.dumps({"pair": pair, "side": side, **runs[side]._asdict()}) + "\n")
        pairs.append((runs["verl"], runs["corrected"]))
    other = f"corrected with {' '.join(given.against)}" if given.against else "own main_ppo"
    print(f"preset {given.preset}, {given.steps} steps a run; verl's is {other}")
    print(format_result(pairs))


if __name__ == "__main__":
    main()
