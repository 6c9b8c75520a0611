"""docs/recording.md says what the code does: columns, metrics, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from recipe.offpolicy.recording.files import LARGEST
from recipe.offpolicy.recording.recorder import FIRST, MOST_TIME, Counters
from recipe.offpolicy.recording.schema import (
    DIGEST_KEY,
    PROMPT_COLUMN,
    REASONS_KEY,
    ROW_COLUMNS,
    SCHEMA,
    SPEC_KEY,
    TOKEN_COLUMNS,
    VERSION_KEY,
)
from tests.support.paths import ROOT
from tests.support.recordings import drawn_rows, record

PAGE = (ROOT / "docs" / "recording.md").read_text()


def test_the_table_of_columns_is_the_schemas() -> None:
    meanings = {name: meaning for name, (_, meaning) in (ROW_COLUMNS | TOKEN_COLUMNS).items()}
    meanings[PROMPT_COLUMN] = "token ids of the prompt; empty where prompts were not recorded"
    kinds = {
        each.name: f"list of {each.type.value_type}" if pa.types.is_list(each.type) else each.type for each in SCHEMA
    }
    rows = [f"| `{name}` | {kind} | {meanings[name]} |" for name, kind in kinds.items()]
    assert "\n".join(("| column | type | meaning |", "|---|---|---|", *rows)) in PAGE
    assert len(rows) == 19


def test_metrics_and_metadata_are_named() -> None:
    for name in (*vars(Counters()), "stopped"):
        assert name in PAGE
    for key in (VERSION_KEY, SPEC_KEY, REASONS_KEY, DIGEST_KEY):
        assert f"`{key.decode()}`" in PAGE


def test_limits_are_the_codes() -> None:
    assert (MOST_TIME, FIRST, LARGEST) == (0.05, 1.0, 8 * 2**30)
    for said in (
        "5 % of the last step's time on recording, measured per step, and 1 s in the first",
        "more than 8 GiB",
    ):
        assert said in " ".join(PAGE.split())


@pytest.mark.parametrize("number", range(2))
def test_the_examples_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "recording", drawn_rows([2, 3]), drawn_rows([4], step=2))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    exec(blocks[number], {})
