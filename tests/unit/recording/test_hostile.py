"""Files that are cut short, damaged or made to harm: each is an error that names the file, and nothing is unpickled."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.offpolicy.recording import Recording, RecordingError
from recipe.offpolicy.recording import files as files_module
from recipe.offpolicy.recording.files import Step, read, to_table, write
from tests.support.recordings import NONE, drawn_rows, same

ROWS = drawn_rows([5, 1, 9, 3], rejected_by=np.arange(18, dtype=np.uint32) % 2)
REASONS = ("masks.gsm",)
NAME = "step_00000001.rank_00000.parquet"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / NAME, ROWS, NONE, REASONS)
    return tmp_path / NAME


def whole(step: Step) -> bool:
    return same(step.rows, ROWS) and step.spec == NONE and step.reasons == REASONS


def test_every_truncation_is_an_error_that_names_the_file(path: Path) -> None:
    content = path.read_bytes()
    footer = len(content) - 300
    for length in [*range(0, footer, 61), *range(footer, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(RecordingError, match=NAME):
            read(path)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_bytes_are_noticed_or_without_effect(path: Path, seed: int) -> None:
    """The rows as they were, or an error: never other rows, another exception, or no end."""
    content, rng, noticed = path.read_bytes(), random.Random(seed), 0
    for _ in range(80):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 8])):
            # Half of them among the metadata at the end, where sizes and offsets are.
            place = rng.randrange(len(damaged)) if rng.random() < 0.5 else len(damaged) - 1 - rng.randrange(3000)
            damaged[place] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            assert whole(read(path))
        except RecordingError:
            noticed += 1
    assert noticed > 20


def test_rows_repeated_without_end_are_refused_before_they_are_unpacked(path: Path) -> None:
    """160 000 rows of 4: 720 000 tokens, by 8 bytes and more than a dozen columns above 64 MiB, in a file of few KB."""
    table = pa.concat_tables([pq.read_table(path)] * 40_000).combine_chunks()
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size * files_module.UNPACKED < 2**26
    before = pa.total_allocated_bytes()
    with pytest.raises(RecordingError, match=rf"{NAME}: declares an unpacked size of \d+ bytes, more than 67108864"):
        read(path)
    assert pa.total_allocated_bytes() == before


def test_a_pipe_does_not_hang_and_a_directory_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(RecordingError, match="not a regular file"):
        read(tmp_path / NAME)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    with pytest.raises(RecordingError, match="not a regular file"):
        read(tmp_path / NAME)


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table], **metadata: bytes) -> Path:
    """The file with its table changed and its metadata updated, written by another hand."""
    table = change(to_table(ROWS, NONE, REASONS))
    kept = to_table(ROWS, NONE, REASONS).schema.metadata | {f"offpolicy.{k}".encode(): v for k, v in metadata.items()}
    pq.write_table(table.replace_schema_metadata(kept), path)
    return path


def with_column(name: str, column: pa.Array) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.schema.get_field_index(name), pa.field(name, column.type), column)


def unchanged(table: pa.Table) -> pa.Table:
    return table


def test_a_column_that_is_missing(path: Path) -> None:
    with pytest.raises(RecordingError, match=f"{NAME}: weight is missing"):
        read(rewritten(path, lambda table: table.drop_columns(["weight"])))


def test_a_row_without_a_value(path: Path) -> None:
    with pytest.raises(RecordingError, match=f"{NAME}: reward has a missing value"):
        read(rewritten(path, with_column("reward", pa.array([1.0, None, 0.0, 0.0], type=pa.float32()))))


@pytest.mark.parametrize(
    "reasons", [b"", b"{", b'{"a": 1}', b"[1]", b'["a"', json.dumps(["m"] * 33).encode()], ids=range(6)
)
def test_reasons_that_are_no_names(path: Path, reasons: bytes) -> None:
    with pytest.raises(RecordingError, match=f"{NAME}: offpolicy.rejected_by in its metadata"):
        read(rewritten(path, unchanged, rejected_by=reasons))


@pytest.mark.parametrize("version", [b"4", b"0", b"", b"1 ", b"\xff" * 1000], ids=range(5))
def test_other_versions_of_the_schema(path: Path, version: bytes) -> None:
    with pytest.raises(RecordingError, match=f"{NAME}: schema .*, but this release reads 1 to 3") as caught:
        read(rewritten(path, unchanged, schema=version))
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_file_that_unpacks_to_too_much_is_not_unpacked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 million equal tokens take some kB; what they unpack to is said in the metadata."""
    rows = drawn_rows([400_000], **{name: np.zeros(400_000, np.float32) for name in ("log_prob", "rollout_log_prob")})
    write(path, rows, NONE, REASONS)
    assert read(path).rows.tokens == 400_000

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("unpacked")

    monkeypatch.setattr(files_module, "LARGEST", 8 * 400_000)
    monkeypatch.setattr(files_module.pq.ParquetFile, "read", never)
    with pytest.raises(RecordingError, match=f"{NAME}: declares an unpacked size of"):
        read(path)


def test_a_run_of_a_billion_values_is_not_unpacked(path: Path) -> None:
    """One page of a few bytes whose header says 2^31 - 1 values: Arrow would make room for all of them.

    A header of a page of version 1: field 5, a structure (0x2c after fields 1, 2 and 3), whose field 1 is the count as
    a zigzag varint (0x15): 18 values are 0x24, and 2^31 - 1 values are fe ff ff ff 0f.
    """
    table = to_table(ROWS, NONE, REASONS)
    pq.write_table(table, path, use_dictionary=False, compression="none", write_statistics=False)
    assert whole(read(path))
    content = path.read_bytes()
    place = content.rindex(bytes([0x2C, 0x15, 36]))  # of the last column, behind which the footer is
    path.write_bytes(content[: place + 2] + bytes.fromhex("feffffff0f") + content[place + 3 :])
    with pytest.raises(RecordingError, match=f"{NAME}: declares an unpacked size of"):
        read(path)


def test_a_contradiction_at_which_arrow_ends_the_process(path: Path) -> None:
    """Two counts of levels where there is one level: asked for the metadata of the column, Arrow calls abort.

    In the statistics of sizes, a list (0x19) of no i64 (0x06), twice, becomes a list of two zeros (0x26 0 0).
    """
    content = path.read_bytes()
    assert content.count(b"\x19\x06\x19\x06") > 0
    path.write_bytes(content.replace(b"\x19\x06\x19\x06", b"\x19\x26\0\0", 1))
    with pytest.raises(RecordingError, match=NAME):
        read(path)


class Dangerous:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/offpolicy-unpickled",)


def test_nothing_is_unpickled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles where pandas, Arrow and their users have kept them: metadata of the table and of its fields."""
    bomb = pickle.dumps(Dangerous())

    def armed(table: pa.Table) -> pa.Table:
        schema = table.schema
        fields = [
            field.with_metadata(
                {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": bomb}
            )
            for field in schema
        ]
        return table.cast(pa.schema(fields, metadata=schema.metadata))

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    table = armed(to_table(ROWS, NONE, REASONS))
    pq.write_table(table.replace_schema_metadata(table.schema.metadata | {b"pandas": bomb, b"extra": bomb}), path)
    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    with contextlib.suppress(RecordingError):
        assert whole(read(path))
    assert not Path("/tmp/offpolicy-unpickled").exists()


def test_a_card_that_is_a_pipe_or_too_large(path: Path) -> None:
    card = path.parent / "run.json"
    os.mkfifo(card)
    with pytest.raises(RecordingError, match=r"run\.json: not a file"):
        _ = Recording(path.parent).card
    card.unlink()
    with card.open("wb") as sink:
        sink.truncate(65 * 2**20)
    with pytest.raises(RecordingError, match="larger than"):
        _ = Recording(path.parent).card
