"""Commands that measure one cost each run at a small size, and what all benchmarks share; no time is asserted."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmark import routing_replay, run_share, scoring_cost, teacher_cost
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
    with pytest.raises(RuntimeError, match="ended without an answer"):
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
        answer, client, _ = teacher_cost.measure(teacher.url, rows=20, tokens=8, repeats=2, pid=os.getpid())
        assert [len(row) for row in teacher.asked] == [8] * 60  # two repeats, and one that is not counted
        # The server is a thread of this process here, whose time is the client's as well.
        assert client > 0
        assert answer > 0
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
    found, said = time_the_worker_stage(tmp_path, "--shadow")
    share = found.pop("share_in_loss")
    assert found.pop("shadow") is True
    assert set(found) == {"verl_seconds", "seconds", "verl_loss_seconds", "loss_seconds", "time_ratio"}
    assert all(value > 0 for value in found.values())
    extra = found["loss_seconds"] - found["verl_loss_seconds"]
    assert share == pytest.approx(extra / found["verl_seconds"])
    assert "with a correction" in said


@pytest.mark.verl("==0.9.1")
def test_the_worker_stage_is_timed_with_and_without_centering(tmp_path: Path) -> None:
    found, said = time_the_worker_stage(tmp_path, "--centering", "4", "--vocabulary", "64")
    assert (found["centering"], found["vocabulary"]) == (4, 64)
    assert {"uncentred_seconds", "uncentred_growth_bytes", "ours_growth_bytes"} < set(found)
    assert "4 of 64 tokens" in said


def time_the_worker_stage(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The figures without those that were given, and what the command said."""
    sizes = [argument for name, value in SIZES.items() for argument in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, str(FOLDER / "worker_stage.py"), "--model", "tiny", *sizes, *options, "--json"]
    result = subprocess.run([*command, str(folder / "figures.json")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads((folder / "figures.json").read_text())
    assert {name: found.pop(name) for name in SIZES} == SIZES
    assert (found.pop("model"), found.pop("device")) == ("tiny", "cpu")
    return found, result.stdout


def test_a_ratio_is_the_median_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 s native; replayed 2, 1.5 and 4 s."""
    clock = [0.0]
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    lengths = iter([0.0, 2.0, 1.5, 4.0])

    def native() -> None:
        clock[0] += 1

    def replayed() -> None:
        clock[0] += next(lengths)

    expected = {"native": 1.0, "replayed": 2.0, "ratio": 2.0, "pairs": 3}
    assert routing_replay.measure(native, replayed, 3) == expected


def test_a_small_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routing_replay.main(
        ["--hidden", "32", "--layers", "2", "--tokens", "64", "--pairs", "1", "--json", str(tmp_path / "cost.json")]
    )
    assert "8 experts, 2 a token, 2 layers, hidden 32, 64 tokens" in capsys.readouterr().out
    assert json.loads((tmp_path / "cost.json").read_text())["pairs"] == 1


# What statistics and the recorder take of a real run's steps: the sums, and the notes of calls that they are of


def test_shares_by_hand() -> None:
    """Three steps, of which the first is left out; two calls a step in the worker and one in the driver."""
    timed = {"timing_s/update_actor": 2.0, "offpolicy/record/seconds": 0.1}
    metrics = [{"timing_s/step": seconds, **timed} for seconds in (100.0, 4.0, 6.0)]
    calls = [{"name": "worker.leave", "seconds": seconds} for seconds in (9.0, 9.0, 0.01, 0.02, 0.03, 0.04)]
    calls += [{"name": "driver.collect", "seconds": seconds} for seconds in (9.0, 0.05, 0.05)]
    calls += [{"name": "seal.compare", "seconds": seconds} for seconds in (9.0, 0.01, 0.03)]
    calls += [{"name": "proof.first", "seconds": seconds} for seconds in (0.3, 0.1)]
    found = run_share.compute_shares(metrics, calls)
    expected = {
        "steps": 3,
        "step_seconds": 5.0,
        "worker_seconds": 0.05,
        "driver_seconds": 0.05,
        "recorder_seconds": 0.1,
        "statistics_share": 0.02,
        "recorder_share": 0.02,
        "seal_seconds": 0.02,
        "seal_share": 0.004,
        "proof_seconds": 0.4,
        "proof_share": 0.2,
        "staleness_seconds": 0.0,
        "staleness_share": 0.0,
    }
    assert found == pytest.approx(expected)
    assert "50.0 ms in the worker and 50.0 ms in the driver, 2.00 % of a step" in run_share.format_figures(found)
    assert "limit of staleness" not in run_share.format_figures(found)
    # Looks at the buffer come as often as the trainer has to wait.
    calls += [{"name": "staleness.enough", "seconds": seconds} for seconds in (0.05, 0.06, 0.02, 0.2)]
    limited = run_share.compute_shares(metrics, calls)
    of_limit = {"staleness.enough": 0.11, "staleness_seconds": 0.11, "staleness_share": 0.003}
    assert limited == pytest.approx(expected | of_limit)
    said = "limit of staleness: 110.0 ms, 0.30 % of a step, the first included (enough 110.0)"
    assert said in run_share.format_figures(limited)


@pytest.mark.verl("==0.9.1")
@pytest.mark.parametrize("target", run_share.CALLS.values())
def test_the_functions_that_are_timed_exist(target: str) -> None:
    pytest.importorskip("transfer_queue")
    assert callable(pkgutil.resolve_name(target))


@pytest.mark.slow
def test_calls_are_noted_where_a_module_arrives_later(tmp_path: Path) -> None:
    code = (
        "import run_share\n"
        "from recipe.offpolicy.worker.metrics import Ledger, Packet\n"
        "ledger, packet = Ledger(), Packet(1)\n"
        "ledger.leave(packet)\n"
        "ledger.settle(packet)\n"
    )
    environment = os.environ | {"OFFPOLICY_CALL_TIMES": str(tmp_path), "PYTHONPATH": f"{ROOT}:{FOLDER}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    calls = run_share.read_calls(tmp_path)
    assert [call["name"] for call in calls] == ["worker.leave"]
    assert calls[0]["seconds"] > 0


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
    run_share.main(["--steps", "3", "--json", str(tmp_path / "figures.json"), "correction=gsm"])
    assert json.loads((tmp_path / "figures.json").read_text())["statistics_share"] == pytest.approx(0.1)
    assert "200.0 ms in the worker" in capsys.readouterr().out
    steps, recording, own = (tmp_path / "run" / "arguments").read_text().splitlines()
    assert (steps, own) == ("trainer.total_training_steps=3", "correction=gsm")
    assert recording.startswith("offpolicy.record.dir=")
    with pytest.raises(SystemExit):
        run_share.main(["--steps", "1"])


def test_pairs_are_another_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("scripts.benchmark.paired_runs.main", lambda words: seen.append(words) or 4)
    for pairs in (["--pairs", "2"], ["--pairs=2"]):
        with pytest.raises(SystemExit) as stop:
            run_share.main([*pairs, "--out", "pairs.jsonl"])
        assert stop.value.code == 4
        assert seen[-1] == [*pairs, "--out", "pairs.jsonl"]
