"""Verdicts of the search for causes on the recordings of ``cases``, and how many of them are wrong.

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

from recipe.offpolicy.analysis.attribution.cause import Cause
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


def judged(part: Part) -> list[Judged]:
    """Judge every case of ``part`` from its rows alone; the search does not read the card."""

    def search(case: FaultCase) -> Judged:
        return Judged(case, find_causes(Recording(DATA / part / f"{case.name}-{case.seed}").rows(), {}))

    return [search(case) for case in CASES if case.part == part]


def main(part: Part) -> int:
    results = judged(part)

    def join(names: frozenset[str]) -> str:
        return ", ".join(sorted(names)) or "none"

    rows = [
        [f"{one.case.name}-{one.case.seed}", join(one.case.causes), join(one.found), one.found == one.case.causes]
        for one in results
    ]
    columns = [Column(name) for name in ("case", "injected", "found", "right")]
    false, missed = (
        sum(map(len, each))
        for each in zip(*((one.found - one.case.causes, one.case.causes - one.found) for one in results), strict=True)
    )
    title = f"{part}: {len(results)} runs, {false} causes found that were not injected, {missed} missed"
    Console().print(to_rich(Table(columns, rows, title)))
    return 0


if __name__ == "__main__":
    from recipe.offpolicy.process_start import answer_help

    answer_help(__doc__)
    parts: dict[tuple[str, ...], Part] = {(): "held_out", ("held_out",): "held_out", ("tuning",): "tuning"}
    sys.exit(main(parts[given]) if (given := (*sys.argv[1:],)) in parts else __doc__)
