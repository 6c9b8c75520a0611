"""Length by correctness over steps, from metrics and from a recording."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis.lengths import (
    CurveError,
    build_table,
    draw_curves,
    measure_rows,
    read_curves,
)
from recipe.offpolicy.analysis.table import to_plain
from recipe.offpolicy.lengths import main
from tests.support.recordings import drawn_rows, record

REWARDS = np.array([1, 0, 1, 1, 0, 0, 0, 0], np.float32)
LENGTHS = [4, 8, 6, 2, 9, 9, 9, 5]


def metrics(path: Path, steps: int = 3, **more: float | None) -> Path:
    lines = [{"step": 0, "data": {"val-core/x": 1.0}}]
    for step in range(1, steps + 1):
        data: dict[str, Any] = {
            "response_length/mean": 10.0 + step,
            "critic/score/mean": 0.5,
            "length/right/mean": 5.0 * step,
        } | more
        data |= {"length/easy/mean": None, "note": "text"}  # as verl's logger writes NaN
        lines.append({"step": step, "data": data})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_recorded_step_by_hand() -> None:
    """Two prompts of four rows: 3 of 4 right, and none."""
    rows = drawn_rows(LENGTHS, reward=REWARDS)
    found = measure_rows(rows, 1.0)
    assert (found.step, found.reward) == (1, 0.375)
    assert found.lengths["all"] == 6.5
    assert (found.lengths["right"], found.lengths["wrong"]) == (4.0, 8.0)
    assert (math.isnan(found.lengths["easy"]), found.lengths["hard"]) == (True, 8.0)


def test_metrics_and_recordings_make_the_same_table(tmp_path: Path) -> None:
    directory = record(tmp_path / "run", *(drawn_rows(LENGTHS, reward=REWARDS, step=step) for step in (1, 2)))
    curves = read_curves(directory, correct_at_least=1.0)
    assert [each.step for each in curves] == [1, 2]
    table = build_table(curves)
    assert to_plain(table.rows[0]) == [1, 6.5, 4.0, 8.0, None, 8.0, 0.375]
    of_metrics = build_table(read_curves(metrics(tmp_path / "metrics.jsonl"), correct_at_least=1.0))
    assert of_metrics.columns == table.columns
    assert to_plain(of_metrics.rows[2]) == [3, 13.0, 15.0, None, None, None, 0.5]
    assert to_plain(curves)[0]["lengths"]["easy"] is None


def test_many_steps_are_thinned_with_both_ends(tmp_path: Path) -> None:
    curves = read_curves(metrics(tmp_path / "metrics.jsonl", steps=100), correct_at_least=1.0)
    steps = [row[0] for row in build_table(curves, most=5).rows]
    assert (steps[0], steps[-1], len(steps)) == (1, 100, 5)
    assert len(build_table(curves[:1]).rows) == 1


def test_a_step_of_unknown_length_is_kept(tmp_path: Path) -> None:
    found = read_curves(metrics(tmp_path / "m.jsonl", 3, **{"response_length/mean": None}), correct_at_least=1.0)
    assert [math.isnan(each.lengths["all"]) for each in found] == [True] * 3
    assert [each.lengths["right"] for each in found] == [5.0, 10.0, 15.0]
    draw_curves({"run": found})


@pytest.mark.parametrize("given", [["--correct-at-least", "nan"], ["--samples", "0"], ["--samples", "-3"]])
def test_numbers_that_mean_nothing_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["metrics.jsonl", *given])
    assert f"argument {given[0]}: '{given[1]}' is not a" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "1.jsonl"
    dump.write_text('{"input": "q", "score": 1, "step": 1}')
    assert main([str(dump), "--tokenizer", str(tmp_path)]) == 2
    assert f"--tokenizer {tmp_path}: there is no tokenizer" in capsys.readouterr().err


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, picture = metrics(tmp_path / "metrics.jsonl"), tmp_path / "lengths.png"
    assert main([str(source), str(source), "--png", str(picture)]) == 0
    assert "right (tokens)" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
    assert main([str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[str(source)][0]["lengths"]["right"] == 5.0


def test_a_figure_has_a_row_for_each_run(tmp_path: Path) -> None:
    curves = read_curves(metrics(tmp_path / "metrics.jsonl"), correct_at_least=1.0)
    axes = draw_curves({"one": curves, "two": curves}).axes
    assert [axis.get_title(loc="left") for axis in axes] == ["one", "Reward", "two", "Reward"]
    assert [line.get_label() for line in axes[0].get_lines()] == ["all answers", "right answers"]


@pytest.mark.parametrize(
    ("text", "said"), [("{}", "line 1: this is not a line"), ("x", "line 1"), ("", "no step records response_")]
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(CurveError, match=said):
        read_curves(path, correct_at_least=1.0)
    assert main([str(path)]) == 2
    assert said in capsys.readouterr().err
