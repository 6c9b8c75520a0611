"""A directory of recorded steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from recordings import NONE, drawn_rows, record, same

from recipe.offpolicy.recording import Recording, RecordingError, concatenated
from recipe.offpolicy.recording.files import write
from recipe.offpolicy.recording.recording import file_name, step_of

FIRST, SECOND, LATER = drawn_rows([2, 3]), drawn_rows([4], rank=1, seed=1), drawn_rows([1], step=12, seed=2)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path, SECOND, LATER, FIRST)


def test_names_say_step_and_rank() -> None:
    assert file_name(12, 3) == "step_00000012.rank_00003.parquet"
    assert step_of(file_name(12, 3)) == (12, 3)
    for name in ("step_1.rank_0.parquet", "step_00000001.rank_00000.partial", "run.json", ".step_00000001.rank_00000"):
        assert step_of(name) is None


def test_steps_in_order_and_ranks_together(recorded: Path) -> None:
    recording = Recording(recorded)
    assert recording.steps == [1, 12]
    assert same(recording.step(1).rows, concatenated([FIRST, SECOND]))
    assert [len(step.rows) for step in recording] == [3, 1]
    assert same(recording.rows(), concatenated([FIRST, SECOND, LATER]))


def test_other_files_do_not_matter(recorded: Path) -> None:
    (recorded / "notes.txt").write_text("mine")
    (recorded / "step_00000003.rank_00000.partial").write_bytes(b"PAR1")
    assert Recording(str(recorded)).steps == [1, 12]


def test_card_and_proof(recorded: Path) -> None:
    assert Recording(recorded).card == {}
    assert Recording(recorded).proof == {}
    (recorded / "run.json").write_text(json.dumps({"release": "0.9.1"}))
    (recorded / "proof.json").write_text(json.dumps({"step": 1}))
    assert Recording(recorded).card == {"release": "0.9.1"}
    assert Recording(recorded).proof == {"step": 1}


def test_no_directory_and_no_step(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no such directory"):
        Recording(tmp_path / "nowhere")
    with pytest.raises(RecordingError, match="no recorded step"):
        Recording(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match="no such directory"):
        Recording(tmp_path / "file")


def test_ranks_of_other_corrections(recorded: Path) -> None:
    write(recorded / file_name(1, 1), SECOND, {**NONE, "alpha": 0.5}, ())
    with pytest.raises(RecordingError, match=r"rank_00001\.parquet: recorded under another correction than step_"):
        Recording(recorded).step(1)


def test_a_file_under_the_name_of_another(recorded: Path) -> None:
    shutil.copy(recorded / file_name(1, 0), recorded / file_name(2, 0))
    with pytest.raises(RecordingError, match=r"step_00000002\.rank_00000\.parquet: its rows are of other steps"):
        Recording(recorded).step(2)
    shutil.copy(recorded / file_name(1, 0), recorded / file_name(1, 2))
    with pytest.raises(RecordingError, match=r"rank_00002\.parquet: its rows are of other steps or ranks"):
        Recording(recorded).step(1)


def test_a_directory_that_cannot_be_read(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(RecordingError, match=r"not readable \(Permission denied\)\. Mend its permissions"):
        Recording(recorded)
