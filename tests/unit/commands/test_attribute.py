"""python -m recipe.offpolicy.attribute, and the steps it goes through."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context
from numpy.typing import NDArray

from recipe.offpolicy import attribute
from recipe.offpolicy.analysis.attribution.attribution import summarize_rows
from recipe.offpolicy.analysis.attribution.decomposition import (
    VersionMismatch,
    compute_row_sums,
    decompose,
    resample,
    summarize_by_version,
)
from recipe.offpolicy.recording import Rows, concatenate
from tests.support.attributed import attribute_rows
from tests.support.recordings import drawn_rows, record


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two steps of fresh and stale rows."""
    lengths = [8] * 64
    ages = np.repeat([0, 1], 32)
    steps = [
        drawn_rows(lengths, step=step, seed=step, group=8, backend=0.02, drift=0.01, oldest_version=step - 1 - ages)
        for step in (2, 3)
    ]
    return record(tmp_path / "recording", *steps)


def test_tables(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attribute.main([str(recorded), "--worst", "3"]) == 0
    shown = capsys.readouterr().out
    for text in ("causes", "by step", "by version of the weights", "by probability", "worst tokens", "«"):
        assert text in shown
    assert "does not name its model" in shown
    assert "No cause stands out" in shown


@pytest.mark.slow
def test_what_mends_a_cause_is_whole_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert attribute.main(["tests/data/faults/held_out/colocate_async-14"]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("Fix for stale weights: ")]
    assert line.endswith("correct for it: correction=opsm correction.masks.opsm.delta=0.1")
    assert "0.0%" in shown
    assert "-0.0%" not in shown


def test_json_says_everything(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attribute.main([str(recorded), "--json", "--steps", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [3]
    assert found["rows"] == 64
    assert found["whole"]["tokens"] == 512
    split = found["whole"]["variance"]
    assert split["backend"] + split["staleness"] + split["drift"] == pytest.approx(1.0)
    # Noise of 0.02 in the backend and of 0.01 in the drift: 4 to 1.
    assert split["backend"] == pytest.approx(0.8, abs=0.1)
    assert len(found["causes"]) == 7


@pytest.mark.slow
@pytest.mark.parametrize("apart", [0.0, 0.1])
def test_pictures_of_policies_that_agree(apart: float, tmp_path: Path) -> None:
    """pi is mu, and pi_old is mu as well or lies ``apart``: there is nothing to share out."""
    rows = drawn_rows([8] * 64)
    mu = rows.rollout_log_prob
    directory = record(tmp_path / "r", replace(rows, old_log_prob=mu - np.float32(apart), log_prob=mu))
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    with rc_context({"svg.fonttype": "none"}):
        assert attribute.main([str(directory), "--png", str(svg), "--html", str(html)]) == 0
    assert "mu and pi agree exactly" in svg.read_text()
    assert ("mu and pi_old agree exactly" in svg.read_text()) == (apart == 0)


def test_a_defect_is_not_taken_for_bad_input(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ValueError("defect")

    monkeypatch.setattr("recipe.offpolicy.analysis.attribution.attribution_page.draw_overview", broken)
    with pytest.raises(ValueError, match="defect"):
        attribute.main([str(recorded), "--png", "a.png"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/nowhere"], "no such directory"),
        (["{dir}", "--steps", "7:9"], "no step from 7 to 9"),
        (["{dir}", "--steps", "7:"], "no step from 7 on"),
        # Before the recording is read, which may take minutes.
        (["{tmp}/nowhere", "--png", "{tmp}/a.nonsense"], ".nonsense is not a picture format. Name it .png or .svg"),
        (["{tmp}/nowhere", "--html", "{tmp}"], "it is a directory. Name a file"),
    ],
)
def test_bad_input_is_one_sentence(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert attribute.main([text.format(tmp=tmp_path, dir=recorded) for text in arguments]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert len(errors.splitlines()) == 1


def test_a_damaged_file_is_named(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = next(iter(sorted(recorded.glob("*.parquet"))))
    damaged.write_bytes(damaged.read_bytes()[:200])
    assert attribute.main([str(recorded)]) == 2
    assert damaged.name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "steps"),
    [("3:", [3]), ("2:3", [2, 3]), (":2", [2]), ("1:", [2, 3]), ("3", [3])],
)
def test_either_end_of_the_steps_may_be_left_out(
    text: str, steps: list[int], recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attribute.main([str(recorded), "--json", "--steps", text]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == steps


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--steps", "3:1", "ends before it begins"),
        ("--steps", "x", "is neither FIRST:LAST"),
        ("--steps", "1:y", "is neither FIRST:LAST"),
        ("--steps", ":", "is neither FIRST:LAST"),
        ("--steps", "³", "is neither FIRST:LAST"),
        ("--worst", "²", "'²' is not a count of 0 or more"),
        ("--worst", "-1", "'-1' is not a count of 0 or more"),
    ],
)
def test_numbers_that_are_none(
    option: str, text: str, said: str, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        attribute.main([str(recorded), f"{option}={text}"])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def sum_rows(rows: Rows) -> Mapping[str, NDArray[np.float64]]:
    return {"recorded": resample(compute_row_sums(rows))}


def summarize(rows: Rows) -> list[VersionMismatch]:
    part = summarize_rows(rows, (0,), worst=0)
    return summarize_by_version(part.cells, part.ages, part.sums["recorded"][0])


def test_a_step_without_fresh_rows_takes_the_floor_from_those_before() -> None:
    lengths = [16] * 32
    fresh = drawn_rows(lengths, step=1, backend=0.02)
    stale = drawn_rows(lengths, step=2, backend=0.1, seed=1, oldest_version=np.zeros(32, dtype=np.int64))
    parts = attribute_rows(concatenate([fresh, stale]), {}).by_step
    assert parts[1].floor_from == "own rows"
    assert parts[2].floor_from == "earlier steps"
    # Variances of 0.0004 and 0.01 in stale rows: 4 % is the backend's.
    assert parts[2].variance.backend == pytest.approx(0.04, abs=0.02)
    low, high = parts[2].intervals["variance.staleness"]
    assert parts[2].variance.staleness is not None
    assert low < parts[2].variance.staleness < high
    # Without that step nothing is known.
    alone = decompose(sum_rows(stale))
    assert alone.floor_from == ""
    assert alone.variance.backend is None
    assert "variance.backend" not in alone.intervals


def test_versions() -> None:
    ages = np.array([0] * 16 + [2] * 16 + [-1] * 16)
    rows = drawn_rows([16] * 48, step=5, backend=0.05, oldest_version=np.where(ages < 0, -1, 4 - ages))
    versions = {version.staleness: version for version in summarize(rows)}
    fresh, unknown, old = versions[0], versions[-1], versions[2]
    assert fresh.backend == fresh.k3
    assert unknown.backend is None
    assert (old.rows, old.tokens) == (16, 256)
    assert old.k3 == pytest.approx(0.05**2 / 2, rel=0.3)
    # The same engine sampled both: what fresh rows show is what stale ones have.
    assert old.backend == pytest.approx(old.k3, rel=0.4)
