"""A directory of recorded steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.recording import Recording, RecordingError
from recipe.offpolicy.recording.files import write
from recipe.offpolicy.recording.recording import file_name, join_alike
from tests.support.recordings import NONE, drawn_rows, record

FIRST, SECOND, LATER = drawn_rows([2, 3]), drawn_rows([4], rank=1, seed=1), drawn_rows([1], step=12, seed=2)

OTHER = {**NONE, "alpha": 0.5}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path, SECOND, LATER, FIRST)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Step 1 has two ranks and three updates, the last with another correction; step 2 has one update."""
    for update, spec in enumerate((NONE, NONE, OTHER)):
        for rank in range(2):
            rows = drawn_rows([update + 1], rank=rank, seed=10 * update + rank)
            write(tmp_path / file_name(1, rank, update), rows, spec, ())
    return record(tmp_path, drawn_rows([9], step=2))


def test_parts_of_one_correction_are_joined_where_it_asks_for_it(several: Path) -> None:
    parts = Recording(several).parts(1)
    joined = join_alike(parts, lambda part: dict(part.spec) == NONE)
    assert [np.diff(part.rows.offsets).tolist() for part in joined] == [[1, 1, 2, 2], [3], [3]]
    assert [len(part.rows) for part in join_alike(parts)] == [4, 2]


def test_a_step_in_one_file_and_in_files_of_updates(several: Path) -> None:
    record(several, FIRST)
    with pytest.raises(
        RecordingError,
        match=r"step_00000001\.rank_00000\.parquet: this file of a whole step is mixed with files of single updates",
    ):
        list(Recording(several))


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (file_name(1, 0), PermissionError(13, "Permission denied"), r"not readable \(Perm.*\)\. Fix its permissions\."),
        ("run.json", OSError(5, "Input/output error"), r"not readable \(Input/.*\)\. Fix the cause, or read a copy\."),
    ],
)
def test_what_the_system_does_not_let_be_read_is_never_to_be_removed(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: OSError, said: str
) -> None:
    (recorded / "run.json").write_text("{}")
    original = Path.open

    def denied(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == name:
            raise error
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", denied)
    recording = Recording(recorded)
    with pytest.raises(RecordingError, match=f"{name} is {said}$"):
        _ = recording.card if name == "run.json" else recording.step(1)
