"""Recorded files as they are, in the tools that people have: pandas, polars and duckdb."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recipe.offpolicy.recording import Rows, concatenate
from recipe.offpolicy.recording.schema import ROW_COLUMNS, SCHEMA
from tests.support.recordings import drawn_rows, record

PARTS = (
    drawn_rows([3, 6, 1], step=1, rejected_by=np.array([0, 1, 3] + [0] * 6 + [2**31], dtype=np.uint32)),
    drawn_rows([2, 4], step=1, rank=1, seed=1),
    drawn_rows([5], step=2, seed=2),
)
ALL = concatenate(PARTS)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return record(tmp_path, *PARTS, reasons=[f"masks.m{i}" for i in range(32)])


def column_of(rows: Rows, name: str) -> list[Any]:
    """The column as plain Python, a list a row for tokens."""
    values = getattr(rows, name).tolist()
    if name in ROW_COLUMNS:
        return values
    ends = (rows.prompt_offsets if name == "prompt_ids" else rows.offsets).tolist()
    return [values[start:end] for start, end in pairwise(ends)]


def test_polars(directory: Path) -> None:
    frame = pl.scan_parquet(directory / "*.parquet").collect()
    assert frame.columns == SCHEMA.names
    for name in SCHEMA.names:
        assert frame[name].to_list() == column_of(ALL, name), name
