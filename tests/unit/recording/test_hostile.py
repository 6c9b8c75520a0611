"""Truncated, damaged and malicious files: each is an error that names the file, and nothing is unpickled."""

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
from recipe.offpolicy.recording.files import DeclaredError, Step, read, read_declared_size, to_table, write
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
    for length in [*range(0, footer, 211), *range(footer, len(content), 17), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(RecordingError, match=NAME):
            read(path)


@pytest.mark.parametrize("seed", range(2))
def test_damaged_bytes_are_noticed_or_without_effect(path: Path, seed: int) -> None:
    """The result is the original rows or an error, never other rows, another exception, or an endless loop."""
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
    """160 000 rows times 4: 720 000 tokens of 8 bytes in more than a dozen columns exceed 64 MiB, in a file
    of few KB.
    """
    table = pa.concat_tables([pq.read_table(path)] * 40_000).combine_chunks()
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size * files_module.UNPACKED < 2**26
    before = pa.total_allocated_bytes()
    with pytest.raises(
        RecordingError, match=rf"{NAME}: the file declares an unpacked size of \d+ bytes, more than 67108864"
    ):
        read(path)
    assert pa.total_allocated_bytes() == before


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table], **metadata: bytes) -> Path:
    """Write the file again with a changed table and updated metadata."""
    table = change(to_table(ROWS, NONE, REASONS))
    kept = to_table(ROWS, NONE, REASONS).schema.metadata | {f"offpolicy.{k}".encode(): v for k, v in metadata.items()}
    pq.write_table(table.replace_schema_metadata(kept), path)
    return path


def unchanged(table: pa.Table) -> pa.Table:
    return table


def test_a_column_that_is_missing(path: Path) -> None:
    with pytest.raises(RecordingError, match=f"{NAME}: weight is missing"):
        read(rewritten(path, lambda table: table.drop_columns(["weight"])))


@pytest.mark.parametrize("reasons", [b"{", json.dumps(["m"] * 33).encode()], ids=range(2))
def test_reasons_that_are_no_names(path: Path, reasons: bytes) -> None:
    with pytest.raises(RecordingError, match=f"{NAME}: offpolicy.rejected_by in its metadata"):
        read(rewritten(path, unchanged, rejected_by=reasons))


@pytest.mark.parametrize("version", [b"4", b"\xff" * 1000], ids=range(2))
def test_other_versions_of_the_schema(path: Path, version: bytes) -> None:
    with pytest.raises(RecordingError, match=f"{NAME} has schema .*, but this release reads schemas 1 to 3") as caught:
        read(rewritten(path, unchanged, schema=version))
    assert len(str(caught.value)) < len(str(path)) + 200


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
    """Pickles in the places where pandas, Arrow and their users have kept them: metadata of the table and of its
    fields.
    """
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
    with pytest.raises(RecordingError, match=r"run\.json: this is not a file"):
        _ = Recording(path.parent).card
    card.unlink()
    with card.open("wb") as sink:
        sink.truncate(65 * 2**20)
    with pytest.raises(RecordingError, match="larger than"):
        _ = Recording(path.parent).card


def table(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "number": rng.standard_normal(rows),
            "word": [f"w{i % 7}" for i in range(rows)],
            "lists": [list(range(i % 5)) for i in range(rows)],
            "flags": [bool(i % 3) for i in range(rows)],
        }
    )


def zigzag(count: int) -> bytes:
    """A count in Thrift's compact protocol: doubled, with seven bits per byte, lowest bits first."""
    doubled = 2 * count
    size = max(1, -(-doubled.bit_length() // 7))
    return bytes([doubled >> 7 * i & 0x7F | 0x80 * (i < size - 1) for i in range(size)])


def test_a_page_that_unpacks_to_more_than_the_footer_says(tmp_path: Path) -> None:
    """535 bytes, of which Arrow makes a million values: runs of equal levels and indices, well formed.

    The footer says 18 values and 66 bytes, so that neither a bound on pyarrow's metadata nor reading row group by row
    group would notice; with runs of 2^31 - 1 values the same bytes take the memory of the machine.
    """
    count = 2**20 + 100
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False))
    column = pa.ListArray.from_arrays(
        pa.array([0, count], pa.int32()), pa.array(np.zeros(count, np.float32)), type=kind
    )
    path = tmp_path / "some.parquet"
    options = {"compression": "none", "write_statistics": False, "data_page_size": 2**30}
    pq.write_table(pa.table({"weight": column}), path, store_schema=False, **options)
    content = path.read_bytes()
    end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer_says = content[end:-8].replace(zigzag(count), zigzag(18), 1)
    path.write_bytes(content[:end] + footer_says + len(footer_says).to_bytes(4, "little") + b"PAR1")

    assert path.stat().st_size < 1000
    with pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(0).column(0)
        assert (chunk.num_values, chunk.total_uncompressed_size < 100) == (18, True)
        assert len(file.read_row_group(0).column(0).combine_chunks().flatten()) == count
    assert read_declared_size(path).values == count + 1  # and the one word of the dictionary


def footer(content: bytes) -> bytes:
    return b"PAR1" + content + len(content).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        # Field 4, a list (0x49) of lists of lists ...
        (b"\x49" + b"\x19" * 5000 + b"\0", "not valid: RecursionError"),
        # ... of structures (0xfc: the size follows), 2^35 of them.
        (b"\x49\xfc\xff\xff\xff\xff\x7f", "not valid: IndexError"),
        # Field 1, an i32 (0x15), of eleven bytes.
        (b"\x15" + b"\xff" * 11, "more than 64 bits"),
        # Field 4, a list of one structure; its field 3, an i64 (0x36), is -1.
        (b"\x49\x1c\x36\x01\0\0", "negative"),
    ],
    ids=range(4),
)
def test_footers_that_somebody_made_up(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "some").write_bytes(footer(content))
    with pytest.raises(DeclaredError, match=reason):
        read_declared_size(tmp_path / "some")
