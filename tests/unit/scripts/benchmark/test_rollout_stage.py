"""The benchmark of verl's helper runs, and says what it measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts.benchmark import rollout_stage

pytest.importorskip("verl")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.extended
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout_stage.main(["--quick", "--markdown", "--json", str(tmp_path / "cost.json")])
    (row,) = json.loads((tmp_path / "cost.json").read_text())["cases"]
    assert row["shape"] == [32, 256]
    timed = ("seconds", "verl_seconds", "time_ratio", "wall_one_thread", "wall_two_threads")
    assert min(row[name] for name in timed) > 0
    header, rule, line = capsys.readouterr().out.strip().splitlines()
    assert header.count("|") == rule.count("|") == line.count("|") == len(rollout_stage.COLUMNS) + 1
    assert line.startswith("| 32 x 256 | normalised TIS, all 11 |")


@pytest.mark.slow
@pytest.mark.extended
def test_the_curve_is_measured_and_drawn(tmp_path: Path) -> None:
    points = rollout_stage.measure_curve([(16, 1024), (64, 4096)], repeats=1)
    assert [(point["helper"], point["tokens"]) for point in points] == [
        *(("ours", 2**14), ("verl", 2**14), ("ours", 2**18), ("verl", 2**18))
    ]
    assert all(point["seconds"] > 0 for point in points)
    small, large = (point for point in points if point["helper"] == "verl")
    assert 0 <= small["bytes"] < large["bytes"]
    rollout_stage.draw(points, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    lines = rollout_stage.format_tables({"cases": [], "curve": points, "first": {"compiled": 0.5}}).splitlines()
    assert lines[5].startswith("| 2^14 | ours |")
    assert lines[-1] == "| compiled | 0.50 |"


@pytest.mark.slow
@pytest.mark.extended
def test_peak_memory_is_that_of_one_call() -> None:
    """Ours returns 4 bytes a token, less the pages without a valid one; verl's holds many such tensors at once."""
    options, shape = rollout_stage.CASES["token TIS"], (256, 4096)
    ours, verls = (rollout_stage.measure_memory(who, shape, options) for who in ("ours", "verl"))
    tokens = shape[0] * shape[1]
    assert 0.3 * 4 * tokens < ours < 1.25 * 4 * tokens  # and what else a process grows by
    assert verls > 5 * ours


def test_a_third_of_the_tokens_is_valid() -> None:
    old, mu, mask = rollout_stage.draw_inputs(512, 1000)
    assert 0.25 < mask.double().mean() < 0.35
    assert not (old * (1 - mask)).any()
    assert not (mu * (1 - mask)).any()
    assert (mask.diff(dim=1) <= 0).all()
