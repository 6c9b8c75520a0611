"""Precision and recall of the search for causes on the recordings of ``cases``, together with its verdicts.

python scripts/evidence/injected_faults/evaluate.py [tuning|held_out]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from injected_faults.cases import CASES, FaultCase, Part
from rich.console import Console

from recipe.offpolicy.analysis.attribution.cause import NAMES, Cause
from recipe.offpolicy.analysis.attribution.causes import find_causes
from recipe.offpolicy.analysis.table import Column, Table, to_rich
from recipe.offpolicy.recording import Recording

DATA = ROOT / "tests" / "data" / "faults"


@dataclass(frozen=True)
class Judged:
    """A case, and the causes that were found in its recording."""

    case: FaultCase
    causes: Sequence[Cause]

    @property
    def found(self) -> frozenset[str]:
        return frozenset(cause.name for cause in self.causes if cause.verdict == "present")


@dataclass(frozen=True)
class Score:
    """Counts of one cause over several cases; precision and recall are NaN if there is nothing to count.

    Attributes:
        right, false, missed: numbers of cases in which the cause was present and found, absent but found, and present
            but not found.
    """

    right: int
    false: int
    missed: int

    @property
    def precision(self) -> float:
        return self.right / (self.right + self.false) if self.right + self.false else float("nan")

    @property
    def recall(self) -> float:
        return self.right / (self.right + self.missed) if self.right + self.missed else float("nan")


def judged(part: Part) -> list[Judged]:
    """Judge every case of ``part`` from its rows alone; the search does not read the card."""

    def search(case: FaultCase) -> Judged:
        return Judged(case, find_causes(Recording(DATA / part / f"{case.name}-{case.seed}").rows(), {}))

    return [search(case) for case in CASES if case.part == part]


def scores(results: Sequence[Judged]) -> dict[str, Score]:
    """Compute the score of each cause, and of "all" causes together."""

    def count(*names: str) -> Score:
        known = set(names)
        pairs = [(one.found & known, one.case.causes & known) for one in results]
        return Score(
            right=sum(len(found & there) for found, there in pairs),
            false=sum(len(found - there) for found, there in pairs),
            missed=sum(len(there - found) for found, there in pairs),
        )

    return {name: count(name) for name in NAMES} | {"all": count(*NAMES)}


def main(part: Part) -> int:
    results, console = judged(part), Console()

    def show(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
        console.print(to_rich(Table([Column(name) for name in columns], rows, title)))

    def join(names: frozenset[str]) -> str:
        return ", ".join(sorted(names)) or "none"

    show(
        ("case", "injected", "found", "right"),
        [
            [f"{one.case.name}-{one.case.seed}", join(one.case.causes), join(one.found), one.found == one.case.causes]
            for one in results
        ],
    )
    show(
        ("cause", "right", "false", "missed", "precision", "recall"),
        [[name, s.right, s.false, s.missed, s.precision, s.recall] for name, s in scores(results).items()],
        f"{part}: {len(results)} runs",
    )
    return 0


if __name__ == "__main__":
    from recipe.offpolicy.process_start import answer_help

    answer_help(__doc__)
    parts: dict[tuple[str, ...], Part] = {(): "held_out", ("held_out",): "held_out", ("tuning",): "tuning"}
    sys.exit(main(parts[given]) if (given := (*sys.argv[1:],)) in parts else __doc__)
