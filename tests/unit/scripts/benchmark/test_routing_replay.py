"""The cost of routing replay, measured on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.benchmark.routing_replay import main, measure


def test_a_ratio_is_the_median_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 s native; replayed 2, 1.5 and 4 s."""
    clock = [0.0]
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    lengths = iter([0.0, 2.0, 1.5, 4.0])

    def native() -> None:
        clock[0] += 1

    def replayed() -> None:
        clock[0] += next(lengths)

    found = measure(native, replayed, 3)
    assert (found.native, found.replayed, found.ratio, found.pairs) == (1.0, 2.0, 2.0, 3)


def test_a_small_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--hidden", "32", "--layers", "2", "--tokens", "64", "--pairs", "1", "--json", str(tmp_path / "cost.json")])
    assert "8 experts, 2 a token, 2 layers, hidden 32, 64 tokens" in capsys.readouterr().out
    assert json.loads((tmp_path / "cost.json").read_text())["pairs"] == 1
