"""Length over steps without a penalty and with each kind, before and after normalisation, on a task with free length.

    python scripts/evidence/free_length/free_length.py MODEL [--seeds 8] [--steps 80] [--out OUT] [--seconds S]

MODEL is what `python -m scripts.quickstart.prepare --cache DIR free_length_model` makes. Runs that are there in OUT,
outputs/free_length, are not run again, and none is begun after S seconds, so that a call goes on where the last one
ended. Prints a table of all runs and whether what was expected beforehand came true;
`python -m recipe.offpolicy.lengths OUT/*.jsonl --png FILE` draws them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from free_length.free_length_training import ARMS, train  # noqa: E402
from scripts.quickstart.task import TaskSettings, splits  # noqa: E402

LAST = 10
"""Steps that the start and the end are the mean of."""
SHARE, SEEDS = 1 / 3, 0.75
"""Expected of a collapse: length below this share of none's, and fewer right answers than at its start, in so many."""
WITHIN = 0.05
"""Expected of an anchor: a share of right answers that differs from none's by no more."""

Ends = tuple[float, float, float, float]
"""Length at first, length at last, right at first, right at last."""


def read_ends(path: Path) -> Ends:
    """Read one run's ends, means over ``LAST`` steps."""
    lines = [json.loads(line)["data"] for line in path.read_text().splitlines()]

    def mean(key: str, of: list[dict[str, float]]) -> float:
        return sum(each[key] for each in of) / len(of)

    length, score = "response_length/mean", "critic/score/mean"
    first, last = lines[:LAST], lines[-LAST:]
    return mean(length, first), mean(length, last), mean(score, first), mean(score, last)


def read_runs(out: Path) -> dict[str, dict[int, Ends]]:
    """Read the ends of all runs that are there, by arm and seed."""
    return {
        arm: {
            int(path.stem.rpartition("-")[2]): read_ends(path)
            for path in sorted(out.glob(f"{_name(arm)}-[0-9]*.jsonl"))
        }
        for arm in ARMS
    }


def judge(runs: Mapping[str, Mapping[int, Ends]]) -> list[tuple[str, bool, str]]:
    """Judge what was expected before any run: (expectation, whether it came true, by which figures).

    Before normalisation, uniform and group collapse: in at least ``SEEDS`` of all seeds they end shorter than ``SHARE``
    of none's length, and less often right than at their start. An anchor does not, in either place: means over seeds,
    it is as often right as none within ``WITHIN``, and shorter.
    """
    none, found = runs["none"], []
    for arm in ("uniform/before", "group/before"):
        pairs = [(ends, none[seed]) for seed, ends in runs[arm].items() if seed in none]
        count = sum(ends[1] < SHARE * plain[1] and ends[3] < ends[2] for ends, plain in pairs)
        text = f"{arm} collapses in {SEEDS:.0%} of seeds"
        found.append((text, bool(pairs) and count >= SEEDS * len(pairs), f"{count} of {len(pairs)}"))
    for arm in ("anchor/before", "anchor/after"):
        pairs = [(ends, none[seed]) for seed, ends in runs[arm].items() if seed in none]
        if pairs:
            length, right = (sum(ends[at] - plain[at] for ends, plain in pairs) / len(pairs) for at in (1, 3))
            figures = f"{length:+.1f} tokens, {right:+.3f} right"
            found.append((f"{arm} is shorter than none and as right", length < 0 and abs(right) <= WITHIN, figures))
    return found


def build_table(runs: Mapping[str, Mapping[int, Ends]]) -> Table:
    """Build the table of all runs: means over seeds, and the range of the last length."""
    table = Table("arm", "seeds", "tokens, first", "tokens, last", "least to most", "right, first", "right, last")
    for arm in ARMS:
        found = list(runs[arm].values())
        if found:
            means = [sum(column) / len(found) for column in zip(*found, strict=True)]
            last = [each[1] for each in found]
            cells = (f"{means[0]:.1f}", f"{means[1]:.1f}", f"{min(last):.1f} to {max(last):.1f}")
            table.add_row(arm, str(len(found)), *cells, f"{means[2]:.3f}", f"{means[3]:.3f}")
    return table


def _name(arm: str) -> str:
    return arm.replace("/", "-")


def main() -> None:
    """Run what is left, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "free_length")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    entries, start = splits(TaskSettings())["train"], time.monotonic()
    for seed in range(options.seeds):
        for arm in ARMS:
            path = options.out / f"{_name(arm)}-{seed}.jsonl"
            if not path.exists() and time.monotonic() - start < options.seconds:
                history = train(arm, seed, options.model, entries, options.steps)
                draft = path.with_suffix(".draft")
                draft.write_text("".join(json.dumps(each) + "\n" for each in history))
                draft.rename(path)
                print(
                    f"{path.name}: {time.monotonic() - start:.0f} s, {time.process_time():.0f} s of a core", flush=True
                )
    runs = read_runs(options.out)
    Console(width=120).print(build_table(runs))
    for expectation, came_true, figures in judge(runs):
        print(f"{expectation}: {'yes' if came_true else 'no'} ({figures})")


if __name__ == "__main__":
    main()
