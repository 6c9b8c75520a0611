"""Measures time and memory of stages, loss, proof, plan and packets by size, on random inputs, without Ray or a model.

    python scripts/benchmark/simulated_scale.py [--largest 27] [--memory 20]
    python scripts/benchmark/simulated_scale.py --parts packets plan

The number of tokens, including padding, ranges from 2^18 to 2^27, that of rows from 1 000 to 100 000, and that of ranks
from 8 to 512. Times are the CPU seconds of one thread in a call. User time, which is spent on the computation, is
reported separately from system time, which is spent on allocating pages again for each temporary array of more than 32
MiB; on a GPU, torch keeps these pages. Memory is the peak increase in a fresh process's resident set size during its
first call, not counting the inputs. Sizes whose arrays would take more than ``--memory`` GiB (6) are skipped, with a
message. The exponent is the slope of log time, or log memory, over log size, for the larger half of the sizes, where
caches and fixed costs no longer matter; an exponent of 1 means linear growth. The last line adds up the driver's work
in a step with the most rows and ranks; for comparison, 1 % of a step of 60 s is 0.6 s.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # also in the processes that measure

from scripts.harness import build_parser, format_markdown, format_row, measure_growth, run_in_fresh_process

LEAST_SECONDS = 0.5
"""Minimum total of CPU seconds in a measurement, because the system counts in clock ticks."""
STEP = 60.0
"""Duration in seconds of the step to which the driver's share refers."""
SIZES = {"row": (1_000, 10_000, 100_000), "rank": (8, 64, 512)}
EXPONENTS = (18, 20, 22, 24, 25, 26, 27)
"""Exponents of 2 for the sizes in tokens."""
SMALL = {"token": 2**13, "row": 64, "rank": 2}
"""Sizes at which a part runs once before it is measured."""
LEAST_BYTES = 4 << 20
"""Growth in bytes below which only the allocator's own increments are visible."""
PRELOAD = ("torch", "verl.workers.utils.losses", "recipe.offpolicy.trainer.supervision")
COLUMNS = ("part", "size", "user, ms", "ns a unit", "system, ns a unit", "MiB", "bytes a unit")


def measure_part(name: str, size: int) -> dict[str, float]:
    """Measure one part at one size in this process: user time and system time in seconds, and memory in bytes."""
    import torch

    from scripts.benchmark.simulated_parts import PARTS

    torch.set_num_threads(1)
    part = PARTS[name]
    part.build(SMALL[part.unit])()  # imports
    call = part.build(size)
    grown = measure_growth(call)
    calls, began = 0, resource.getrusage(resource.RUSAGE_SELF)
    while True:
        call()
        calls, now = calls + 1, resource.getrusage(resource.RUSAGE_SELF)
        user, system = now.ru_utime - began.ru_utime, now.ru_stime - began.ru_stime
        if user + system > LEAST_SECONDS:
            break
    return {"seconds": user / calls, "system": system / calls, "bytes": grown}


def fit_exponent(points: Sequence[tuple[float, float]]) -> float:
    """Fit the slope of log y over log x by least squares; NaN for fewer than two points.

    Example:
        >>> fit_exponent([(1, 3.0), (2, 12.0), (4, 48.0)])
        2.0
    """
    if len(points) < 2:
        return math.nan
    x, y = np.log2(points).T
    return float(np.polyfit(x, y, 1)[0])


def measure(names: Sequence[str], largest: int, memory: float) -> list[dict[str, Any]]:
    """Measure the parts at all of their sizes, printing each result at once."""
    from scripts.benchmark.simulated_parts import PARTS

    rows = []
    for name in names:
        part = PARTS[name]
        for size in SIZES.get(part.unit) or [2**exponent for exponent in EXPONENTS if exponent <= largest]:
            needed = part.bytes * size / 2**30
            if size > part.largest or needed > memory:
                why = "a call would take minutes" if size > part.largest else f"about {needed:.0f} GiB"
                print(f"{name}: {format_size(size)} {part.unit}s skipped, {why}", file=sys.stderr)
                continue
            found = run_in_fresh_process(measure_part, name, size, preload=PRELOAD)
            rows.append({"part": name, "unit": part.unit, "size": size, **found, "of_driver": part.of_driver})
            print(format_row(format_cells(rows[-1])), flush=True)
    return rows


def format_size(size: int) -> str:
    """Format a size; a large power of 2 is written as a power.

    Example:
        >>> format_size(2**20), format_size(512), format_size(100_000)
        ('2^20', '512', '100000')
    """
    exponent = size.bit_length() - 1
    return f"2^{exponent}" if size == 2**exponent and exponent > 12 else str(size)


def format_cells(row: Mapping[str, Any]) -> list[str]:
    """Format one measurement under ``COLUMNS``."""
    per_unit = row["seconds"] / row["size"] * 1e9
    return [
        row["part"],
        f"{format_size(row['size'])} {row['unit']}s",
        f"{row['seconds'] * 1e3:.1f}",
        f"{per_unit:.0f}" if per_unit >= 10 else f"{per_unit:.1f}",
        f"{row['system'] / row['size'] * 1e9:.0f}",
        f"{row['bytes'] / 2**20:.1f}",
        f"{row['bytes'] / row['size']:.0f}",
    ]


def format_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the exponents of each part over the larger half of its sizes, and the driver's work in a step."""
    cells, driver = [], 0.0
    for name in dict.fromkeys(row["part"] for row in rows):
        own = sorted((row for row in rows if row["part"] == name), key=lambda row: row["size"])
        if own[-1]["of_driver"]:
            driver += own[-1]["seconds"] + own[-1]["system"]
        own = own[(len(own) - 1) // 2 :]
        time = fit_exponent([(row["size"], row["seconds"]) for row in own])
        memory = fit_exponent([(row["size"], row["bytes"]) for row in own if row["bytes"] >= LEAST_BYTES])
        cells.append([name, *("-" if math.isnan(x) else f"{x:.2f}" for x in (time, memory))])
    lines = ["", *format_markdown(("part", "exponent of time", "of memory"), cells)]
    return "\n".join([*lines, "", f"driver: {driver:.2f} s of CPU time a step, {driver / STEP:.2%} of {STEP:.0f} s"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    from scripts.benchmark.simulated_parts import PARTS

    parser = build_parser(__doc__)
    parser.add_argument("--largest", type=int, default=25, metavar="K", help="tokens up to 2^K")
    parser.add_argument("--memory", type=float, default=6.0, metavar="GIB")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    given = parser.parse_args(arguments)
    print("\n".join(format_markdown(COLUMNS, [])))
    print(format_summary(measure(given.parts, given.largest, given.memory)))


if __name__ == "__main__":
    main()
