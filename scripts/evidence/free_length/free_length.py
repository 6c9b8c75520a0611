"""Length over steps without a penalty and with each kind, before and after normalisation, on a task with free length.

    python scripts/evidence/free_length/free_length.py MODEL [--seeds 8] [--steps 60] [--out OUT] [--seconds S]

MODEL is what free_length_task.py makes. Runs that are there in OUT, outputs/free_length, are not run again, and none is
begun after S seconds, so that a call goes on where the last one ended. Prints a table of all runs;
`python -m recipe.offpolicy.lengths OUT/*.jsonl --png FILE` draws them.
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

import torch  # noqa: E402
from free_length.free_length_training import ARMS, train  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from scripts.quickstart.task import TaskSettings, splits  # noqa: E402

LAST = 10
"""Steps that the end is the mean of."""


def read_ends(path: Path) -> tuple[float, float, float, float]:
    """Read (length at first, length at last, right at first, right at last) of one run, means over ``LAST`` steps."""
    lines = [json.loads(line)["data"] for line in path.read_text().splitlines()]

    def mean(key: str, of: list[dict[str, float]]) -> float:
        return sum(each[key] for each in of) / len(of)

    length, score = "response_length/mean", "critic/score/mean"
    first, last = lines[:LAST], lines[-LAST:]
    return mean(length, first), mean(length, last), mean(score, first), mean(score, last)


def build_table(out: Path) -> Table:
    """Build the table of all runs that are there: means over seeds, and the range of the last length."""
    table = Table("arm", "seeds", "tokens, first", "tokens, last", "least to most", "right, first", "right, last")
    for arm in ARMS:
        found = [read_ends(path) for path in sorted(out.glob(f"{arm.replace('/', '-')}-[0-9]*.jsonl"))]
        if found:
            means = [sum(column) / len(found) for column in zip(*found, strict=True)]
            last = [each[1] for each in found]
            cells = (f"{means[0]:.1f}", f"{means[1]:.1f}", f"{min(last):.1f} to {max(last):.1f}")
            table.add_row(arm, str(len(found)), *cells, f"{means[2]:.3f}", f"{means[3]:.3f}")
    return table


def main() -> None:
    """Run what is left, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "free_length")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    entries, start = splits(TaskSettings())["train"], time.monotonic()
    for seed in range(options.seeds):
        for arm in ARMS:
            path = options.out / f"{arm.replace('/', '-')}-{seed}.jsonl"
            if not path.exists() and time.monotonic() - start < options.seconds:
                history = train(arm, seed, options.model, entries, options.steps)
                path.write_text("".join(json.dumps(each) + "\n" for each in history))
                print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
    Console(width=120).print(build_table(options.out))


if __name__ == "__main__":
    main()
