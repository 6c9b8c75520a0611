"""Precision and recall of the cause finder on the recordings of ``cases``, with its verdicts.

python scripts/evidence/injected_faults/evaluate.py [tuning|held_out]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from injected_faults.cases import CASES, FaultCase, Part  # noqa: E402

from recipe.offpolicy.analysis.attribution.causes import NAMES, Cause, find_causes  # noqa: E402
from recipe.offpolicy.recording import Recording  # noqa: E402

DATA = ROOT / "tests" / "data" / "faults"


@dataclass(frozen=True)
class Judged:
    """A case with the causes found in its recording."""

    case: FaultCase
    causes: Sequence[Cause]

    @property
    def found(self) -> frozenset[str]:
        return frozenset(cause.name for cause in self.causes if cause.verdict == "present")


@dataclass(frozen=True)
class Score:
    """Counts of one cause over several cases; precision and recall are NaN where there is nothing to count.

    Attributes:
        right, false, missed: cases in which it was found and there, found and not there, there and not found.
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
    """Judge every case of ``part`` by its rows alone: the finder does not see the card."""
    return [
        Judged(case, find_causes(Recording(DATA / part / f"{case.name}-{case.seed}").rows()))
        for case in CASES
        if case.part == part
    ]


def scores(results: Sequence[Judged]) -> dict[str, Score]:
    """Score by cause, and "all" together."""
    by_name = {
        name: Score(
            right=sum(name in one.found and name in one.case.causes for one in results),
            false=sum(name in one.found and name not in one.case.causes for one in results),
            missed=sum(name not in one.found and name in one.case.causes for one in results),
        )
        for name in NAMES
    }
    return by_name | {
        "all": Score(*(sum(getattr(score, key) for score in by_name.values()) for key in ("right", "false", "missed")))
    }


def main(part: Part) -> int:
    from rich.console import Console

    from recipe.offpolicy.analysis.pages import Column, Table, to_rich

    results = judged(part)
    console = Console()
    rows = [
        [
            f"{one.case.name}-{one.case.seed}",
            ", ".join(sorted(one.case.causes)) or "none",
            ", ".join(sorted(one.found)) or "none",
            one.found == one.case.causes,
        ]
        for one in results
    ]
    console.print(to_rich(Table([Column("case"), Column("injected"), Column("found"), Column("right")], rows)))
    columns = [Column("cause"), *(Column(name) for name in ("right", "false", "missed", "precision", "recall"))]
    table = [
        [name, score.right, score.false, score.missed, score.precision, score.recall]
        for name, score in scores(results).items()
    ]
    console.print(to_rich(Table(columns, table, title=f"{part}: {len(results)} runs")))
    return 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case [] | ["held_out"]:
            sys.exit(main("held_out"))
        case ["tuning"]:
            sys.exit(main("tuning"))
        case _:
            sys.exit(__doc__)
