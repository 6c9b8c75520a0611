"""Commands that measure one cost each run at a small size, and what all benchmarks share; no time is asserted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.benchmark import routing_replay, run_share, teacher_cost, worker_stage
from scripts.harness import find_median_ratio, take_turns
from tests.support.fake_teacher import FakeTeacher, serving


def test_sides_take_turns_after_a_round_that_does_not_count() -> None:
    called: list[str] = []

    def side(name: str) -> int:
        called.append(name)
        return len(called)

    assert take_turns({"a": lambda: side("a"), "b": lambda: side("b")}, 2) == {"a": [4, 5], "b": [3, 6]}
    assert called == ["a", "b", "b", "a", "a", "b"]
    assert find_median_ratio([1.0, 6.0, 4.0], [2.0, 2.0, 2.0]) == 2.0


def test_each_repeat_asks_about_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeTeacher()) as teacher:
        answer, client, _ = teacher_cost.measure(teacher.url, rows=20, tokens=8, repeats=2, pid=os.getpid())
        assert [len(row) for row in teacher.asked] == [8] * 60  # two repeats, and one that is not counted
        # The server is a thread of this process here, whose time is the client's as well.
        assert client > 0
        assert answer > 0
        assert teacher_cost.main([teacher.url, "--rows", "2", "--tokens", "4", "--repeats", "1"]) == 0
    assert capsys.readouterr().out.startswith("2 rows of 4 ids; a prompt position: answered in ")


@pytest.mark.verl("==0.9.1")
def test_the_worker_stage_is_timed_with_centering() -> None:
    sizes = worker_stage.Sizes(rows=3, prompt=2, response=4, micro_batches=2, mini_batches=3)
    found = worker_stage.compare("tiny", sizes, 2, "cpu", centering=4, vocabulary=64)
    assert (found["centering"], found["vocabulary"], found["rows"]) == (4, 64, 3)
    assert {"uncentred_seconds", "uncentred_growth_bytes", "ours_growth_bytes"} < set(found)
    assert "4 of 64 tokens" in worker_stage.format_figures(found)


def test_a_small_model_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    routing_replay.main(["--hidden", "32", "--layers", "2", "--tokens", "64", "--pairs", "1"])
    assert "8 experts, 2 a token, 2 layers, hidden 32, 64 tokens" in capsys.readouterr().out


# What statistics and the recorder take of a real run's steps: the sums, and the notes of calls that they are of


QUICKSTART = """
echo "quickstart, everything goes to run"
mkdir -p run
for step in 1 2 3; do
    echo '{"step": '$step', "data": {"actor/grad_norm": 1, "timing_s/step": 2.0, "timing_s/update_actor": 1.0,
    "offpolicy/record/seconds": 0.1}}' | tr -d "\\n"
    echo
    echo '{"name": "worker.leave", "seconds": 0.2}' >>"$OFFPOLICY_CALL_TIMES/1.jsonl"
done >run/metrics.jsonl
printf '%s\\n' "$@" >run/arguments
exit 3
"""
"""Stands in for the run, whose score need not rise."""


def test_the_command_reads_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "quickstart.sh").write_text(QUICKSTART)
    monkeypatch.setattr("scripts.harness.ROOT", tmp_path)
    run_share.main(["--steps", "3", "correction=gsm"])
    assert "200.0 ms in the worker and 0.0 ms in the driver, 10.00 % of a step" in capsys.readouterr().out
    steps, recording, own = (tmp_path / "run" / "arguments").read_text().splitlines()
    assert (steps, own) == ("trainer.total_training_steps=3", "correction=gsm")
    assert recording.startswith("offpolicy.record.dir=")
    with pytest.raises(SystemExit):
        run_share.main(["--steps", "1"])
