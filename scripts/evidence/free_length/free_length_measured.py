"""Figures of the runs at free length: from metrics to a small table of raw means, ends, verdict and figure."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from recipe.offpolicy.analysis.pages.plotting import apply_style, create_axes, save

ARMS = ("none", *(f"{kind}/{place}" for kind in ("uniform", "group", "anchor") for place in ("after", "before")))
BLOCK = 5
"""Steps that a raw figure is the mean of."""
LAST = 2
"""Blocks that the start and the end are the mean of."""
VERL_BLOCK, VERL_LAST = 4, 1
"""The same of the shorter runs on verl itself."""
SHARE, SEEDS = 1 / 3, 0.75
"""Expected of a collapse: length below this share of none's, and fewer right answers than at its start, in so many."""
WITHIN = 0.05
"""Expected of an anchor: a share of right answers that differs from none's by no more."""
COLUMNS = {"tokens": "response_length/mean", "right": "critic/score/mean", "anchor": "length/anchor/mean"}
"""Raw figure -> metric."""

Ends = tuple[float, float, float, float]
"""Length at first, length at last, right at first, right at last."""


@dataclass(frozen=True)
class Block:
    """Means over steps up to ``step``; the anchor is NaN where there is none."""

    step: int
    tokens: float
    right: float
    anchor: float


Measured = Mapping[tuple[str, int], Sequence[Block]]
"""(arm, seed) -> blocks."""


def read_runs(out: Path, block: int = BLOCK) -> dict[tuple[str, int], list[Block]]:
    """Read all runs' metrics in a folder, files named as ``uniform-before-1.jsonl``, in blocks of so many steps."""
    found = {}
    for arm in ARMS:
        for path in sorted(out.glob(f"{arm.replace('/', '-')}-[0-9]*.jsonl")):
            found[arm, int(path.stem.rpartition("-")[2])] = read_blocks(path, block)
    return found


def read_blocks(path: Path, steps: int = BLOCK) -> list[Block]:
    """Read the blocks of one run's metrics, as verl's logger ``file`` writes them, means over so many steps."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    trained = [line for line in lines if COLUMNS["tokens"] in line["data"]]
    blocks = [trained[start : start + steps] for start in range(0, len(trained), steps)]

    def mean(block: list[dict], metric: str) -> float:
        known = [value for line in block if isinstance(value := line["data"].get(metric), int | float)]
        known = [value for value in known if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    return [Block(block[-1]["step"], *(mean(block, metric) for metric in COLUMNS.values())) for block in blocks]


def write_measured(measured: Measured, path: Path) -> None:
    """Write the raw figures."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("arm", "seed", "step", *COLUMNS))
        for (arm, seed), blocks in measured.items():
            for each in blocks:
                anchor = "" if math.isnan(each.anchor) else f"{each.anchor:.1f}"
                writer.writerow((arm, seed, each.step, f"{each.tokens:.2f}", f"{each.right:.4f}", anchor))


def read_measured(path: Path) -> dict[tuple[str, int], list[Block]]:
    """Read what ``write_measured`` wrote."""
    found: dict[tuple[str, int], list[Block]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            block = Block(int(row["step"]), float(row["tokens"]), float(row["right"]), float(row["anchor"] or "nan"))
            found.setdefault((row["arm"], int(row["seed"])), []).append(block)
    return found


def compute_ends(blocks: Sequence[Block], last: int = LAST) -> Ends:
    """Compute the ends of one run, means over its first and last blocks."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    tokens, right = [each.tokens for each in blocks], [each.right for each in blocks]
    return mean(tokens[:last]), mean(tokens[-last:]), mean(right[:last]), mean(right[-last:])


def judge(ends: Mapping[tuple[str, int], Ends]) -> list[tuple[str, bool, str]]:
    """Judge what was expected before any run: (expectation, whether it came true, by which figures).

    Before normalisation, uniform and group collapse: in at least ``SEEDS`` of all seeds they end shorter than ``SHARE``
    of none's length, and less often right than at their start. An anchor does not, in either place: means over seeds,
    it is as often right as none within ``WITHIN``, and shorter.
    """
    found = []

    def pairs(arm: str) -> list[tuple[Ends, Ends]]:
        """Ends of each seed with none's."""
        return [
            (each, ends["none", seed]) for (name, seed), each in ends.items() if name == arm and ("none", seed) in ends
        ]

    for arm in ("uniform/before", "group/before"):
        both = pairs(arm)
        count = sum(each[1] < SHARE * none[1] and each[3] < each[2] for each, none in both)
        text = f"{arm} collapses in {SEEDS:.0%} of seeds"
        found.append((text, bool(both) and count >= SEEDS * len(both), f"{count} of {len(both)}"))
    for arm in ("anchor/before", "anchor/after"):
        if both := pairs(arm):
            length, right = (sum(each[at] - none[at] for each, none in both) / len(both) for at in (1, 3))
            figures = f"{length:+.1f} tokens, {right:+.3f} right"
            found.append((f"{arm} is shorter than none and as right", length < 0 and abs(right) <= WITHIN, figures))
    return found


def build_table(ends: Mapping[tuple[str, int], Ends]) -> Table:
    """Build the table of all runs: means over seeds, and the range of the last length."""
    table = Table("arm", "seeds", "tokens, first", "tokens, last", "least to most", "right, first", "right, last")
    for arm in ARMS:
        found = [each for (name, _), each in ends.items() if name == arm]
        if found:
            means = [sum(column) / len(found) for column in zip(*found, strict=True)]
            last = [each[1] for each in found]
            cells = (f"{means[0]:.1f}", f"{means[1]:.1f}", f"{min(last):.1f} to {max(last):.1f}")
            table.add_row(arm, str(len(found)), *cells, f"{means[2]:.3f}", f"{means[3]:.3f}")
    return table


def draw(measured: Measured, path: Path) -> None:
    """Draw length and share of right answers over steps: means over seeds, and thin lines for each seed."""
    with apply_style():
        figure, (lengths, right) = create_axes(1, 2)
        for number, arm in enumerate(ARMS):
            runs = [blocks for (name, _), blocks in measured.items() if name == arm]
            if not runs:
                continue
            steps = [each.step for each in runs[0]]
            dashes = "--" if arm.endswith("before") else "-"
            colour = f"C{number}"
            kind, _, place = arm.partition("/")
            label = f"{kind}, {place} normalising" if place else "no penalty"
            for axes, name in ((lengths, "tokens"), (right, "right")):
                curves = [[getattr(each, name) for each in blocks] for blocks in runs]
                for curve in curves:
                    axes.plot(steps, curve, dashes, color=colour, alpha=0.2, linewidth=0.7)
                means = [sum(values) / len(values) for values in zip(*curves, strict=True)]
                axes.plot(steps, means, dashes, color=colour, label=label)
        lengths.set(title="Length of answers", xlabel="step", ylabel="mean response tokens")
        lengths.set_ylim(bottom=0)
        right.set(title="Right answers", xlabel="step", ylabel="share", ylim=(0, 1))
        right.legend()
    save(figure, path)
