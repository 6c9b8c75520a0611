"""What a Parquet file says of itself, against what Arrow says of files that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.offpolicy.recording.files import DeclaredError, read_declared_size


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False},
        {"compression": "none"},
        {"data_page_version": "2.0"},
        {"row_group_size": 300, "data_page_size": 500},
        {"write_page_index": True, "write_page_checksum": True},
    ],
    ids=str,
)
def test_as_arrow_says(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "some.parquet"
    pq.write_table(table(1000), path, **options)
    found, metadata = read_declared_size(path), pq.ParquetFile(path).metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    assert found.rows == 1000
    # Arrow counts no dictionary, of which there are at most 7 words, 5 numbers and 1000 numbers; and page headers.
    values, size = (sum(getattr(c, name) for c in columns) for name in ("num_values", "total_uncompressed_size"))
    assert values <= found.values <= values + 1012 * len(groups)
    assert 0.8 * size < found.size <= size


def zigzag(count: int) -> bytes:
    """A count in Thrift's compact protocol: doubled, seven bits a byte, the lowest first."""
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


@pytest.mark.parametrize(
    "content", [b"", b"PAR1PAR1", b"PAR1" + b"\xff" * 8 + b"PAR1", b"PAR1\0\1\0\0\0PAR1"], ids=range(4)
)
def test_what_cannot_be_followed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "some").write_bytes(content)
    with pytest.raises(DeclaredError):
        read_declared_size(tmp_path / "some")


def footer(content: bytes) -> bytes:
    return b"PAR1" + content + len(content).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        # Field 4, a list (0x49) of lists of lists ...
        (b"\x49" + b"\x19" * 100 + b"\0", "nested too deeply"),
        # ... of structures (0xfc: the size follows), 2^35 of them.
        (b"\x49\xfc\xff\xff\xff\xff\x7f", "entries"),
        (b"\x49\x1c", "end too early"),
        # Field 1, an i32 (0x15), of eleven bytes.
        (b"\x15" + b"\xff" * 11, "more than 64 bits"),
        (b"\x1d\0", "unknown kind"),
        # Field 4, a list of one structure; its field 3, an i64 (0x36), is -1.
        (b"\x49\x1c\x36\x01\0\0", "negative"),
        (b"\x49\x1c\0\0", "missing"),
        (b"\0", "missing"),
    ],
    ids=range(8),
)
def test_footers_that_somebody_made_up(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "some").write_bytes(footer(content))
    with pytest.raises(DeclaredError, match=reason):
        read_declared_size(tmp_path / "some")
