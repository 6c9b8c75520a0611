"""docs/recording.md says what the code does: columns, metrics, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from recipe.offpolicy.recording.schema import PROMPT_COLUMN, ROW_COLUMNS, SCHEMA, TOKEN_COLUMNS
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


@pytest.mark.parametrize("number", range(2))
def test_the_examples_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "recording", drawn_rows([2, 3]), drawn_rows([4], step=2))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    exec(blocks[number], {})
