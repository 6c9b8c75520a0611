"""A directory of recorded steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.offpolicy.recording import Recording, RecordingError, concatenate
from recipe.offpolicy.recording.files import write
from recipe.offpolicy.recording.recording import file_name, join_alike, parse_step, parse_update
from tests.support.recordings import NONE, drawn_rows, record, same

FIRST, SECOND, LATER = drawn_rows([2, 3]), drawn_rows([4], rank=1, seed=1), drawn_rows([1], step=12, seed=2)

OTHER = {**NONE, "alpha": 0.5}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path, SECOND, LATER, FIRST)


def test_names_say_step_and_rank() -> None:
    assert file_name(12, 3) == "step_00000012.rank_00003.parquet"
    assert parse_step(file_name(12, 3)) == (12, 3)
    assert (parse_step(file_name(12, 3)), parse_update(file_name(12, 3))) == ((12, 3), None)
    assert file_name(12, 3, update=4) == "step_00000012.update_0004.rank_00003.parquet"
    assert (parse_step(file_name(12, 3, 4)), parse_update(file_name(12, 3, 4))) == ((12, 3), 4)
    for name in ("step_1.rank_0.parquet", "step_00000001.rank_00000.partial", "run.json", ".step_00000001.rank_00000"):
        assert parse_step(name) is None


def test_steps_in_order_and_ranks_together(recorded: Path) -> None:
    recording = Recording(recorded)
    assert recording.steps == [1, 12]
    assert same(recording.step(1).rows, concatenate([FIRST, SECOND]))
    assert [len(step.rows) for step in recording] == [3, 1]
    assert same(recording.rows(), concatenate([FIRST, SECOND, LATER]))


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


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Step 1 of two ranks and three updates, of which the last is under another correction; step 2 is of one update."""
    for update, spec in enumerate((NONE, NONE, OTHER)):
        for rank in range(2):
            rows = drawn_rows([update + 1], rank=rank, seed=10 * update + rank)
            write(tmp_path / file_name(1, rank, update), rows, spec, ())
    return record(tmp_path, drawn_rows([9], step=2))


def test_a_step_under_several_corrections(several: Path) -> None:
    recording = Recording(several)
    assert recording.steps == [1, 2]
    assert [(dict(step.spec), np.diff(step.rows.offsets).tolist()) for step in recording] == [
        (NONE, [1, 1, 2, 2]),
        (OTHER, [3, 3]),
        (NONE, [9]),
    ]
    assert np.diff(recording.rows().offsets).tolist() == [1, 1, 2, 2, 3, 3, 9]
    assert len(recording.parts(1)) == 6
    with pytest.raises(RecordingError, match=r"2 corrections acted in step 1.*Recording\.corrections\(1\)"):
        recording.step(1)
    assert len(recording.step(2).rows) == 1


def test_a_step_in_pieces(several: Path) -> None:
    """Of successive files: each file by itself, and up to the size of three."""
    recording = Recording(several)
    size = max(path.stat().st_size for path in recording.files[1])
    alone = recording.in_pieces(1)
    assert [[len(part.rows) for part in piece] for piece in alone.pieces(1)] == [[1]] * 6
    threes = recording.in_pieces(3 * size)
    lengths = [[np.diff(part.rows.offsets).tolist() for part in piece] for piece in threes.pieces(1)]
    assert lengths == [[[1, 1, 2]], [[2], [3, 3]]]
    assert len(list(threes)) == 4
    (whole,) = recording.in_pieces().pieces(1)
    assert [np.diff(part.rows.offsets).tolist() for part in whole] == [[1, 1, 2, 2], [3, 3]]
    assert [len(step.rows) for step in recording.corrections(1)] == [4, 2]
    assert len(alone.corrections(1)) == 2


def test_parts_of_one_correction_are_joined_where_it_asks_for_it(several: Path) -> None:
    parts = Recording(several).parts(1)
    joined = join_alike(parts, lambda part: dict(part.spec) == NONE)
    assert [np.diff(part.rows.offsets).tolist() for part in joined] == [[1, 1, 2, 2], [3], [3]]
    assert [len(part.rows) for part in join_alike(parts)] == [4, 2]


def test_one_file_is_read_by_its_place(several: Path) -> None:
    recording = Recording(several)
    assert dict(recording.part(1, -1).spec) == OTHER
    first = next(recording.iterate_parts(1))
    assert same(recording.part(1, 0).rows, first.rows)


def test_updates_under_one_correction_are_one_step(several: Path) -> None:
    for rank in range(2):
        (several / file_name(1, rank, 2)).unlink()
    assert len(Recording(several).step(1).rows) == 4


def test_ranks_of_other_corrections_in_one_update(several: Path) -> None:
    write(several / file_name(1, 1, 2), drawn_rows([3], rank=1), NONE, ())
    with pytest.raises(RecordingError, match=r"update_0002\.rank_00001\.parquet: recorded under another correction"):
        list(Recording(several))


def test_a_step_in_one_file_and_in_files_of_updates(several: Path) -> None:
    record(several, FIRST)
    with pytest.raises(RecordingError, match=r"step_00000001\.rank_00000\.parquet: mixed with files of single updates"):
        list(Recording(several))


def test_a_file_under_the_name_of_another(recorded: Path) -> None:
    shutil.copy(recorded / file_name(1, 0), recorded / file_name(2, 0))
    with pytest.raises(RecordingError, match=r"step_00000002\.rank_00000\.parquet: its rows belong to other steps"):
        Recording(recorded).step(2)
    shutil.copy(recorded / file_name(1, 0), recorded / file_name(1, 2))
    with pytest.raises(RecordingError, match=r"rank_00002\.parquet: its rows belong to other steps or ranks"):
        Recording(recorded).step(1)


def test_a_directory_that_cannot_be_read(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(RecordingError, match=r"not readable \(Permission denied\)\. Fix its permissions"):
        Recording(recorded)


@pytest.mark.parametrize("name", [file_name(1, 0), "run.json"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied"), r"not readable \(Permission denied\)\. Fix its permissions\."),
        (OSError(5, "Input/output error"), r"not readable \(Input/output error\)\. Fix that, or read a copy\."),
    ],
    ids=["permission", "disk"],
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
    with pytest.raises(RecordingError, match=f"{name}: {said}$"):
        _ = recording.card if name == "run.json" else recording.step(1)


def test_no_fix_removes_what_was_recorded(recorded: Path) -> None:
    """Of damage, of a mistyped card, and of memory that does not suffice."""
    (recorded / file_name(1, 0)).write_bytes(b"PAR1")
    with pytest.raises(RecordingError, match=r"too short\)\. Move it out of the directory; the other files are read"):
        Recording(recorded).step(1)
    (recorded / "run.json").write_text('{"release": 0.9.1}')
    with pytest.raises(RecordingError, match=r"column 16 .*\)\. Fix it there, or move it out"):
        _ = Recording(recorded).card


def test_memory_that_does_not_suffice(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise pa.ArrowMemoryError("malloc of size 1 failed")

    monkeypatch.setattr(pq.ParquetFile, "read", full)
    with pytest.raises(RecordingError, match=r"does not fit into free memory\. Read fewer steps\."):
        Recording(recorded).step(1)
