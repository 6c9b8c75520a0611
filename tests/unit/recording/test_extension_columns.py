"""Columns by token that extensions send are recorded next to the recorder's own, and come back to the bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from recipe.offpolicy.analysis.report.timeline import build_timeline
from recipe.offpolicy.recording import Recording
from recipe.offpolicy.recording.files import RecordingError, read, write
from recipe.offpolicy.recording.recording import read_extensions
from recipe.offpolicy.recording.schema import Rows, concatenate
from recipe.offpolicy.recording.writer import Seen, pack, unpack
from recipe.offpolicy.report import main as report
from tests.support.recordings import drawn_rows, record

COLUMN = "offpolicy_teacher"


def extended_rows(step: int = 1) -> Rows:
    rows = drawn_rows([3, 2], step=step)
    return dataclasses.replace(rows, extensions={COLUMN: np.array([1, 2, 3, np.nan, 5], dtype=np.float32)})


def test_a_column_is_packed_on_its_device_with_the_rows_that_are_chosen() -> None:
    """Three rows of at most two tokens; the second is not chosen, the third has one token."""
    floats = torch.zeros(3, 2)
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()
    column = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    seen = Seen(floats.long(), mask, *(5 * [floats]), mask, {}, extensions={COLUMN: column})
    rows = unpack(pack(seen, torch.tensor([True, False, True])), step=1, rank=0, mini_batch=0)
    assert rows.extensions[COLUMN].tolist() == [1.0, 2.0, 5.0]


def test_a_changed_value_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", extended_rows(), {}, [])
    table = pq.read_table(tmp_path / "a.parquet")
    place = table.schema.get_field_index(COLUMN)
    other = table.set_column(place, table.schema.field(place), table.column("weight"))
    pq.write_table(other, tmp_path / "b.parquet")
    with pytest.raises(RecordingError, match="differs from what was recorded"):
        read(tmp_path / "b.parquet")


def test_rows_that_an_extension_was_not_on_for_have_no_value() -> None:
    both = concatenate([drawn_rows([2]), extended_rows()])
    np.testing.assert_array_equal(both.extensions[COLUMN], [np.nan, np.nan, 1, 2, 3, np.nan, 5])
    np.testing.assert_array_equal(both.take([2, 0]).extensions[COLUMN], [np.nan, 5, np.nan, np.nan])


def test_a_card_says_what_each_extension_did() -> None:
    said = {"meaning": "k=4", "replay": "not replayed", "columns": {COLUMN: "log-probs"}}
    assert read_extensions({"extensions": {"opd": said, "odd": {"meaning": None}, "broken": 3}}) == {
        "opd": said,
        "odd": {"meaning": "", "replay": "", "columns": {}},
    }


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_report_shows_its_mean_by_step(tmp_path: Path) -> None:
    """(1 + 2 + 3 + 5) / 4 = 2.75; NaN counts as not there."""
    record(tmp_path / "run", extended_rows(1), extended_rows(2))
    recording = Recording(tmp_path / "run")
    timeline = build_timeline(part for step in recording.steps for part in recording.corrections(step))
    assert [step.extensions for step in timeline.steps] == [{COLUMN: 2.75}, {COLUMN: 2.75}]
    assert report([str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Extensions" in page
    assert "teacher" in page
    assert "2.75" in page
