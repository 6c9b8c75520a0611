"""What is to be fixed before a bound is set: said above every proposal, and of no run that is as it should be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution import attribution, recorded_tokens
from recipe.offpolicy.analysis.attribution.attribution import attribute as attributed
from recipe.offpolicy.analysis.attribution.attribution import describe_faults, describe_recorded_faults
from recipe.offpolicy.analysis.attribution.attribution_page import (
    build_shares_table,
    build_steps_table,
    format_shares,
)
from recipe.offpolicy.analysis.attribution.cause import Cause
from recipe.offpolicy.attribute import main as attribute
from recipe.offpolicy.calibrate import main as calibrate
from recipe.offpolicy.recording import Recording, Rows
from recipe.offpolicy.report import main as report
from tests.support.paths import ROOT
from tests.support.recordings import drawn_rows, record

REAL = ROOT / "tests" / "data" / "faults" / "held_out"
STALE, HEALTHY = REAL / "stale-2-7", REAL / "healthy-10"
ASKED = ("--spec", "correction=[tis_token,gsm]", "--target-kept", "0.98")
FIRST = "The mismatch has a cause that must be fixed first"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_calibrate_says_it_above_its_proposals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert calibrate([str(STALE), *ASKED, "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{FIRST}: stale weights (synchronise at every step")
    assert printed.index(FIRST) < printed.index("Proposed bounds")
    page = (tmp_path / "page.html").read_text()
    assert page.index(FIRST) < page.index("Proposed bounds")
    assert calibrate([str(STALE), *ASKED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mend_first"].startswith(FIRST)
    assert calibrate([str(HEALTHY), *ASKED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mend_first"] is None


@pytest.mark.slow
def test_a_report_says_it_above_its_proposals_and_speaks_of_no_staleness_of_zero(tmp_path: Path) -> None:
    assert report([str(STALE), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count(FIRST) == 2
    assert page.index(FIRST) < page.index("Which bound for masks.opsm?")
    assert page.index("Which bound for masks.opsm?") < page.rindex(FIRST) < page.index("Proposed bounds")
    assert "Backend and unnoticed staleness 62%, drift 38% of KL(mu, pi)" in page
    assert "taleness 0%" not in page


@pytest.mark.slow
def test_older_weights_that_no_version_tells_of_are_no_backend(capsys: pytest.CaptureFixture[str]) -> None:
    found = attributed(Recording(STALE))
    rows = [row[0] for row in build_shares_table(found.whole).rows]
    assert rows == ["backend and unnoticed staleness", "drift"]
    assert [column.name for column in build_steps_table(dict(found.by_step)).columns][3:5] == rows
    assert {key.split(".")[1] for key in found.whole.intervals} == {"rollout", "drift"}
    assert [version.backend for version in found.versions] == [None]
    assert attribute([str(STALE)]) == 0
    assert "0.0% to 0.0%" not in capsys.readouterr().out


def test_of_weights_whose_age_is_noted_nothing_is_to_be_mended() -> None:
    """A run that is asynchronous on purpose: its staleness is what a correction is for."""
    found = attributed(Recording(REAL / "colocate_async-14"))
    assert [cause.name for cause in found.causes if cause.verdict == "present"] == ["stale weights"]
    assert found.mend_first == ""
    assert found.whole.kl.staleness is not None
    assert "staleness" in format_shares(found.whole)


def test_faults_are_named_with_their_fix_and_numerics_are_none() -> None:
    causes = [
        Cause("temperature", "present", {}, "", "set it"),
        Cause("stale weights", "present", {}, "", ""),
        Cause("numerics", "present", {}, "", "any"),
        Cause("misalignment", "absent", {}, ""),
    ]
    assert describe_faults(causes, stale=False).startswith(f"{FIRST}: temperature (set it); stale weights. A bound")
    assert describe_faults(causes[2:], stale=False) == ""


def test_a_long_recording_is_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 of 5 steps, the ends, and of each the same prompt: 10 tokens are not enough for two, of 2 rows of 3 each."""
    monkeypatch.setattr(recorded_tokens, "STEPS", 2)
    monkeypatch.setattr(attribution, "TOKENS", 2 * 10)
    prompts = np.repeat([11, 12, 13, 14], 2).astype(np.int32)
    for step in range(1, 6):
        rows = drawn_rows([3] * 8, step=step, seed=step, prompt_offsets=np.arange(9), prompt_ids=prompts)
        record(tmp_path, rows)
    looked_at: list[Rows] = []

    def find_none(rows: Rows, card: Mapping[str, Any]) -> list[Cause]:
        looked_at.append(rows)
        return []

    monkeypatch.setattr(attribution, "find_causes", find_none)
    assert describe_recorded_faults(Recording(tmp_path), {}) == ""
    (rows,) = looked_at
    assert rows.step.tolist() == [1, 1, 5, 5]
    assert len(set(rows.prompt_ids.tolist())) == 1
