"""Commands that measure one cost each run at a small size, and what all benchmarks share; no time is asserted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmark import routing_replay, scoring_cost, teacher_cost
from scripts.harness import add_counts, build_parser, find_median_ratio, run_in_fresh_process, take_turns
from tests.support.fake_teacher import FakeTeacher, serving
from tests.support.paths import ROOT

FOLDER = ROOT / "scripts" / "benchmark"
SIZES = {"rows": 3, "prompt": 2, "response": 4, "micro_batches": 2, "mini_batches": 3, "pairs": 2}


def test_every_command_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    commands = {path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__":' in path.read_text()}
    assert {"analysis", "paired_runs", "run_share", "simulated_scale", "worker_stage"} <= commands
    assert {command for command in commands if not re.search(rf"\b{command}\b", tests)} == set()


def test_sides_take_turns_after_a_round_that_does_not_count() -> None:
    called: list[str] = []

    def side(name: str) -> int:
        called.append(name)
        return len(called)

    assert take_turns({"a": lambda: side("a"), "b": lambda: side("b")}, 2) == {"a": [4, 5], "b": [3, 6]}
    assert called == ["a", "b", "b", "a", "a", "b"]
    assert find_median_ratio([1.0, 6.0, 4.0], [2.0, 2.0, 2.0]) == 2.0


def test_a_process_that_ends_without_an_answer_is_told() -> None:
    assert run_in_fresh_process(os.getpid) != os.getpid()
    with pytest.raises(RuntimeError, match="ended with no answer"):
        run_in_fresh_process(os._exit, 1)


def test_a_count_is_one_or_more(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser("")
    add_counts(parser, top_k=2)
    assert parser.parse_args(["--top-k", "3"]).top_k == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--top-k", "0"])
    assert "--top-k: 0: give a number of 1 or more" in capsys.readouterr().err


def test_each_repeat_asks_about_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeTeacher()) as teacher:
        cost = teacher_cost.measure(teacher.url, rows=20, tokens=8, repeats=2, pid=os.getpid())
        assert [len(row) for row in teacher.asked] == [8] * 60  # two repeats, and one that is not counted
        # The server is a thread of this process here, whose time is the client's as well.
        assert cost.client > 0
        assert cost.server is not None
        assert cost.answer > 0
        assert teacher_cost.main([teacher.url, "--rows", "2", "--tokens", "4", "--repeats", "1"]) == 0
    assert capsys.readouterr().out.startswith("2 rows of 4 ids; a prompt position: answered in ")


@pytest.mark.verl("==0.9.1")
def test_both_ways_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    assert set(scoring_cost.measure(40, 2)) == {"flat", "by position"}
    assert scoring_cost.main(["--positions", "40", "--repeats", "1"]) == 0
    assert capsys.readouterr().out.count("us a position") == 2


def test_sizes_that_measure_nothing_are_refused() -> None:
    with pytest.raises(SystemExit):
        scoring_cost.main(["--positions", "4"])


@pytest.mark.slow
@pytest.mark.extended
def test_the_worker_stage_is_timed(tmp_path: Path) -> None:
    sizes = [argument for name, value in SIZES.items() for argument in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, str(FOLDER / "worker_stage.py"), "--model", "tiny", *sizes, "--shadow", "--json"]
    result = subprocess.run([*command, str(tmp_path / "figures.json")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads((tmp_path / "figures.json").read_text())
    share = found.pop("share_in_loss")
    assert {name: found.pop(name) for name in SIZES} == SIZES
    assert (found.pop("model"), found.pop("device"), found.pop("shadow")) == ("tiny", "cpu", True)
    assert set(found) == {"verl_seconds", "seconds", "verl_loss_seconds", "loss_seconds", "time_ratio"}
    assert all(value > 0 for value in found.values())
    extra = found["loss_seconds"] - found["verl_loss_seconds"]
    assert share == pytest.approx(extra / found["verl_seconds"])
    assert "with a correction" in result.stdout


def test_a_ratio_is_the_median_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 s native; replayed 2, 1.5 and 4 s."""
    clock = [0.0]
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    lengths = iter([0.0, 2.0, 1.5, 4.0])

    def native() -> None:
        clock[0] += 1

    def replayed() -> None:
        clock[0] += next(lengths)

    found = routing_replay.measure(native, replayed, 3)
    assert (found.native, found.replayed, found.ratio, found.pairs) == (1.0, 2.0, 2.0, 3)


def test_a_small_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routing_replay.main(
        ["--hidden", "32", "--layers", "2", "--tokens", "64", "--pairs", "1", "--json", str(tmp_path / "cost.json")]
    )
    assert "8 experts, 2 a token, 2 layers, hidden 32, 64 tokens" in capsys.readouterr().out
    assert json.loads((tmp_path / "cost.json").read_text())["pairs"] == 1
