"""The evidence on SmolLM2-135M-Instruct: its plan's runs, and its verdicts by hand."""

from __future__ import annotations

import sys

import pandas
import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))

from collapse import results
from real_model import judge, run


def build_runs(ends: dict[str, list[float]]) -> pandas.DataFrame:
    rows = [
        {"arm": arm, "seed": seed, "outcome": "finished", "step": step, "right": right}
        | dict.fromkeys(judge.MEASURES, value)
        for arm, of_seeds in ends.items()
        for seed, end in enumerate(of_seeds, 2)
        for step, right, value in ((0, 0.3, 0.0), (1, None, 9.0), (2, None, 0.25), (12, end, 0.75))
    ]
    return pandas.DataFrame(rows)


def test_verdicts_are_of_pairs_and_measures_leave_the_first_step_out() -> None:
    table = build_runs({"none": [0.4, 0.4, 0.4], "tis": [0.5, 0.5, 0.6], "opsm": [0.5, 0.3, 0.5], "gsm": [0.1]})
    said = judge.format_table(table).splitlines()
    assert "right answers before training: 0.300" in said
    assert "| `tis` | 3 | 0.533 (0.500 to 0.600) | 0.500 | 0.500 | 0.500 | 0.500 |" in said
    assert "* `tis` - `none`: +0.100, +0.100, +0.200: all pairs agree" in said
    assert "* `opsm` - `none`: +0.100, -0.100, +0.100: pairs disagree" in said


def test_lengths_of_the_last_steps_stand_next_to_right_answers() -> None:
    table = build_runs({"length_none": [0.4], "length_anchor": [0.2]})
    table = table.assign(length=table["step"] * 1.0, clipped=0.5, anchor=None).query("arm != 'length_anchor' or step")
    said = judge.format_lengths(table).splitlines()
    assert "| `length_none` | 2 | 1.0 | 5.0 | 0.50 |  | 0.300 | 0.400 |" in said
    assert "| `length_anchor` | 2 | 1.0 | 5.0 | 0.50 |  | 0.300 | 0.200 |" in said
    assert "length" not in judge.format_table(table)


def test_a_run_that_stopped_by_itself_counts_as_0() -> None:
    table = build_runs({"none": [0.4]})
    table["outcome"] = "ended with 1"
    assert judge.pivot_outcomes(table).loc[2, "none"] == 0.0


def test_every_run_of_the_plan_differs_from_others_and_late_ones_alone_are_late() -> None:
    runs = list(run.list_runs(run.ARMS))
    assert len({each.name for each in runs}) == len(runs) == 8 * 3 + 2 + 4 * 2
    assert {each.setting for each in runs if each.arm.lag} == {"late_none", "late_opsm"}
    assert len({(each.arm.overrides, each.arm.lag) for each in runs}) == 14


def test_the_page_says_what_the_committed_runs_show() -> None:
    if not judge.DATA.exists():
        pytest.skip("no run has been committed")
    page = (ROOT / "docs" / "evidence" / "real_model.md").read_text()
    table = results.read(judge.DATA)
    said = (*judge.format_table(table).splitlines(), *judge.format_lengths(table).splitlines())
    assert [line for line in said if line not in page] == []
