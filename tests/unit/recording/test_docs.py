"""docs/recording.md describes what the code does: columns, metrics, and examples that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.recordings import drawn_rows, record

PAGE = (ROOT / "docs" / "recording.md").read_text()


@pytest.mark.parametrize("number", range(2))
def test_the_examples_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "recording", drawn_rows([2, 3]), drawn_rows([4], step=2))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    exec(blocks[number], {})
