"""Length over steps without a penalty and with each kind, before and after normalisation, on a task with free length.

    python scripts/evidence/free_length/free_length.py run MODEL [--seeds 8] [--steps 30] [--out OUT] [--seconds S]
    python scripts/evidence/free_length/free_length.py show MEASURED.csv [--png FILE]
    python scripts/evidence/free_length/free_length.py collect FOLDER [--out measured_verl.csv]

MODEL is what `python -m scripts.quickstart.prepare --cache DIR free_length_model` makes. Runs that are there in OUT,
outputs/free_length, are not run again, and none is begun after S seconds, so that a call goes on where the last one
ended; OUT/measured.csv holds the figures of all. `show` prints them as a table and says whether what was expected
beforehand came true; measured.csv beside this file is what docs/length.md shows. `collect` does with metrics.jsonl of
whole runs on verl, `TASK=free_length bash scripts/quickstart.sh`, copied to FOLDER as none-1.jsonl and
uniform-after-1.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from rich.console import Console  # noqa: E402

from free_length.free_length_measured import (  # noqa: E402
    ARMS,
    VERL_BLOCK,
    VERL_LAST,
    build_table,
    compute_ends,
    draw,
    judge,
    read_measured,
    read_runs,
    write_measured,
)


def run(options: argparse.Namespace) -> None:
    """Run what is left, and write the raw figures."""
    import torch

    from free_length.free_length_training import train
    from scripts.quickstart.task import TaskSettings, splits

    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    entries, start = splits(TaskSettings())["train"], time.monotonic()
    for seed in range(options.seeds):
        for arm in ARMS:
            path = options.out / f"{arm.replace('/', '-')}-{seed}.jsonl"
            if not path.exists() and time.monotonic() - start < options.seconds:
                history = train(arm, seed, options.model, entries, options.steps)
                draft = path.with_suffix(".draft")
                draft.write_text("".join(json.dumps(each) + "\n" for each in history))
                draft.rename(path)
                seconds = f"{time.monotonic() - start:.0f} s, {time.process_time():.0f} s of a core"
                print(f"{path.name}: {seconds}", flush=True)
    write_measured(read_runs(options.out), options.out / "measured.csv")


def show(options: argparse.Namespace) -> None:
    """Print the table of measured figures and what came true, and draw them."""
    measured = read_measured(options.measured)
    ends = {key: compute_ends(blocks) for key, blocks in measured.items()}
    Console(width=120).print(build_table(ends))
    for expectation, came_true, figures in judge(ends):
        print(f"{expectation}: {'yes' if came_true else 'no'} ({figures})")
    if options.png is not None:
        draw(measured, options.png)


def collect(options: argparse.Namespace) -> None:
    """Write the raw figures of whole runs on verl, and print their table."""
    measured = read_runs(options.folder, VERL_BLOCK)
    write_measured(measured, options.out)
    ends = {key: compute_ends(blocks, VERL_LAST) for key, blocks in measured.items()}
    Console(width=120).print(build_table(ends))


def main() -> None:
    """Run, show or collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("model", type=Path)
    running.add_argument("--seeds", type=int, default=8)
    running.add_argument("--steps", type=int, default=30)
    running.add_argument("--out", type=Path, default=ROOT / "outputs" / "free_length")
    running.add_argument("--seconds", type=float, default=float("inf"))
    running.set_defaults(command=run)
    showing = commands.add_parser("show")
    showing.add_argument("measured", type=Path)
    showing.add_argument("--png", type=Path)
    showing.set_defaults(command=show)
    collecting = commands.add_parser("collect")
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("--out", type=Path, default=Path(__file__).with_name("measured_verl.csv"))
    collecting.set_defaults(command=collect)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
