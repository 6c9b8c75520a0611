"""What statistics and the recorder take of a real run's steps: the sums, and the notes of calls that they are of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmark import run_share
from tests.support.paths import ROOT

FOLDER = ROOT / "scripts" / "benchmark"


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
