"""The benchmark of a what-if replay runs on a recording that is at hand."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.recordings import drawn_rows, record

SCRIPT = ROOT / "scripts" / "benchmark" / "whatif.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_whatif", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        record(tmp_path, drawn_rows([30, 7, 50, 12], seed=step, step=step, backend=0.02, drift=0.01))
    monkeypatch.setattr("sys.path", list(sys.path))
    whatif = script()
    monkeypatch.setattr(whatif, "CORRECTIONS", whatif.CORRECTIONS[:2])
    monkeypatch.setattr(whatif, "seconds_to_start", lambda: 1.5)
    monkeypatch.setattr("sys.argv", ["whatif.py", "--recording", str(tmp_path), "--rounds", "1", "--json"])
    threads = torch.get_num_threads()
    try:
        whatif.main()
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 2 * (30 + 7 + 50 + 12)
    assert found["start_seconds"] == 1.5
    assert list(found["replay"]) == [*whatif.CORRECTIONS, "all of these"]
    for rate in (found["read"], *found["replay"].values()):
        assert rate["tokens_a_second"] == pytest.approx(found["tokens"] / rate["median_seconds"])
        assert rate["median_seconds"] > 0
