"""One recorded file: what is written is what is read, completely or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.offpolicy.recording import Recording, RecordingError, Rows
from recipe.offpolicy.recording import files as files_module
from recipe.offpolicy.recording.files import OverLimit, compute_digest, count_rows, read, to_table, write
from recipe.offpolicy.recording.schema import DIGEST_KEY, SCHEMA, VERSION_KEY, has_column
from tests.support.recordings import drawn_rows, same

SPEC = {"weight": {"level": "token", "upper": 2.0}, "masks": {}}
REASONS = ("masks.gsm", "weight")


def written(folder: Path, rows: Rows, spec: Any = SPEC, reasons: tuple[str, ...] = REASONS) -> Path:
    path = folder / "step_00000001.rank_00000.parquet"
    write(path, rows, spec, reasons)
    return path


def test_rows_are_counted_by_what_a_file_declares(tmp_path: Path) -> None:
    path = written(tmp_path, drawn_rows([3, 1, 7]))
    assert count_rows(path) == 3
    assert Recording(tmp_path).count_rows() == 3
    path.write_bytes(b"PAR1")
    with pytest.raises(RecordingError, match="not a readable Parquet file"):
        count_rows(path)
    with pytest.raises(RecordingError, match=r"not readable \(No such file or directory\)"):
        count_rows(tmp_path / "none")


def test_what_is_written_is_read_to_the_bit(tmp_path: Path) -> None:
    odd = np.array([0x7FC00001, 0x7F800001, 0xFF800000, 0x80000000, 1], dtype=np.uint32).view(np.float32)
    bits = np.array([0, 1, 3, 2**31, 2**32 - 1], dtype=np.uint32)
    reasons = tuple(f"masks.m{number}" for number in range(32))
    rows = drawn_rows([4, 0, 1], step=4, rank=2, log_prob=odd, reward=odd[:3], rejected_by=bits)
    step = read(written(tmp_path, rows, reasons=reasons))
    assert same(step.rows, rows)
    assert (step.spec, step.reasons) == (SPEC, reasons)


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    """They lack the column ``version``; in rows of one version, every token gets it."""
    assert [name for name in SCHEMA.names if not has_column(name, 1)] == ["version"]
    rows = drawn_rows([2, 1, 1], oldest_version=np.array([3, 2, -1]), newest_version=np.array([3, 3, -1]))
    table = to_table(rows, SPEC, REASONS).drop_columns(["version"])
    metadata = table.schema.metadata | {VERSION_KEY: b"1"}
    path = tmp_path / "step_00000001.rank_00000.parquet"
    pq.write_table(table.replace_schema_metadata(metadata | {DIGEST_KEY: compute_digest(rows, metadata)}), path)
    found = read(path).rows
    assert same(found, rows)
    assert found.version.tolist() == [3, 3, -1, -1]


def test_a_file_over_its_limit_is_not_left(tmp_path: Path) -> None:
    path = tmp_path / "step_00000001.rank_00000.parquet"
    size = write(path, drawn_rows([50]), SPEC, REASONS)
    before = path.read_bytes()
    with pytest.raises(OverLimit, match=path.name):
        write(path, drawn_rows([51], seed=1), SPEC, REASONS, limit=size - 1)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert write(path, drawn_rows([50]), SPEC, REASONS, limit=size) == size


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(table: pa.Table, path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"PAR1 and then")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files_module.pq, "write_table", half)
    with pytest.raises(OSError, match="Input/output"):
        written(tmp_path, drawn_rows([5]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (b"1", b"a79a8a81650762a071c02ac88ff6434c"),
        (b"2", b"95361bdf085afe43efbbb7dac1fcbe78"),
        (b"3", b"5ea4d3e33bac251d489d54bfed41dee1"),
    ],
)
def test_the_checksum_of_each_version_stays_what_it_was(version: bytes, expected: bytes) -> None:
    """BLAKE2b up to version 2, as the releases that wrote these files computed it; XXH3 from version 3 on."""
    floats = {name: np.array([-1, -2, -3], dtype=np.float32) for name in ("rollout_log_prob", "old_log_prob")}
    rows = drawn_rows([2, 1], **floats, log_prob=floats["old_log_prob"], advantages=floats["old_log_prob"])
    assert compute_digest(rows, {VERSION_KEY: version}) == expected
