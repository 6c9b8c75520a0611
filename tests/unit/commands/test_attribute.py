"""python -m recipe.offpolicy.attribute, and the steps that it performs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy import attribute
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


def test_json_says_everything(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attribute.main([str(recorded), "--json", "--steps", "3:"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [3]
    assert found["rows"] == 64
    assert found["whole"]["tokens"] == 512
    split = found["whole"]["variance"]
    assert split["backend"] + split["staleness"] + split["drift"] == pytest.approx(1.0)
    # Noise of 0.02 in the backend and of 0.01 in the drift: 4 to 1.
    assert split["backend"] == pytest.approx(0.8, abs=0.1)
    assert len(found["causes"]) == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/nowhere"], "no such directory"),
        # Before the recording is read, which may take minutes.
        (["{tmp}/nowhere", "--png", "{tmp}/a.nonsense"], ".nonsense is not a picture format. Name it .png or .svg"),
        (["{tmp}/nowhere", "--html", "{tmp}"], "this is a directory. Name a file"),
    ],
)
def test_bad_input_is_one_sentence(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert attribute.main([text.format(tmp=tmp_path, dir=recorded) for text in arguments]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert len(errors.splitlines()) == 1
