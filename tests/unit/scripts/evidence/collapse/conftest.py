"""What tests of the evidence on collapse share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))

from collapse import results, run


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Results and logs next to the real ones."""
    path = tmp_path / "results.parquet"
    monkeypatch.setattr(run, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(results, "DATA", path)
    monkeypatch.setattr(results, "MACHINE_FAILURES", tmp_path / "machine_failures.csv")
    return path
