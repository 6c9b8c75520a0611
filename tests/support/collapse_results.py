"""Invented results of the evidence on collapse, with an outcome for each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas
from collapse import arms, results

EXACT, GRADED = results.COLUMNS["exact"], results.COLUMNS["graded"]


def build_table(outcome: Callable[[str, int], float]) -> pandas.DataFrame:
    """All runs of H1 to H4: 0.1 before training and ``outcome`` behind the last step."""
    rows: list[dict[str, Any]] = []
    for each in arms.list_runs():
        card = {"arm": each.arm.name, "seed": each.seed, "outcome": "finished"}
        measured = {"kept": 1.0, "weight_min": 1.0, "weight_max": 1.0, "gradient_error": 1e-7, "proved": 1.0}
        rows += results.build_rows(card, [(0, {EXACT: 0.1, "offpolicy/kl/k3": None})])
        rows += results.build_rows(card, [(each.arm.steps, {EXACT: outcome(each.arm.name, each.seed)})])
        rows[-1] |= measured
    return pandas.DataFrame(rows)


AS_EXPECTED = {"in_step": 0.8, "late": 0.0, "late_opsm": 0.7, "control": 0.5, "control_both": 0.5}


def build_late_table(outcome: Callable[[str, int, int], float]) -> pandas.DataFrame:
    """All runs in one process, with an outcome by arm, eta and seed."""
    rows: list[dict[str, Any]] = []
    for each in arms.list_late_runs():
        card = {"arm": each.setting, "seed": each.seed, "outcome": "finished"}
        rows += results.build_rows(card, [(0, {EXACT: 0.26}), (80, {EXACT: outcome(each.group, each.eta, each.seed)})])
    return pandas.DataFrame(rows)
