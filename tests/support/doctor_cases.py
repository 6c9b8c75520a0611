"""Expected verdicts of the doctor: one case per rule, for launches of verl's own program and of ours."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from recipe.offpolicy.preflight.python_source import OURS
from tests.support.paths import ROOT
from tests.support.short_keys import read_changes

VERLS = "verl.trainer.main_ppo"
ROLLOUT = "actor_rollout_ref.rollout"
VERL = "algorithm.rollout_correction"
TIS_OF_VERL: dict[str, Any] = {f"{VERL}.rollout_is": "token"}


class Case(NamedTuple):
    """Changes, the expected verdict on a part, and a further or different change that is accepted."""

    verdict: str
    row: str
    changes: dict[str, Any]
    said: str
    fine: dict[str, Any]
    fixed: bool = True


def _read_cases(text: str) -> dict[str, tuple[str, Case]]:
    cases = {}
    lines = [line for line in re.sub(r"\n {8,}", " ", text).splitlines() if not line.startswith("#")]
    for head, changes, fine in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, part, said, *unfixed = head.split(" -> ")
        verdict, _, row = part.partition(" ")
        given, right = read_changes(changes.strip()), read_changes(fine.strip().removeprefix("fine: "))
        cases[name] = (OURS if name.startswith("ours") else VERLS, Case(verdict, row, given, said, right, not unfixed))
    return cases


CASES = _read_cases((ROOT / "tests/data/doctor_cases.txt").read_text())
