"""Whole runs are resumable, counted when they die, and made again when the machine ended them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from collapse import analyse, arms, results, run

from tests.support.collapse_results import EXACT, GRADED
from tests.support.paths import ROOT

SCRIPTS = ROOT / "scripts" / "evidence"


def test_every_run_has_one_name_and_seed_1_is_in_none() -> None:
    names = [each.name for each in arms.list_runs()]
    assert len(set(names)) == len(names) == 5 * 8 + 2 * 5 + 9 * 3
    assert not [name for name in names if name.endswith("-1")]
    assert {each.arm.steps for each in arms.list_runs()} == {80, 24}


def test_late_runs_carry_the_fault_and_nothing_else_differs_from_those_in_step() -> None:
    by_name, plan = {arm.name: arm for arm in arms.ARMS}, {each.name: each for each in arms.list_runs()}
    command, environment = run.build_run(plan["late-3"])
    assert environment["OFFPOLICY_INJECT"] == "lag:8"
    assert command[-2:] == ["offpolicy.delivery.sums=null", "offpolicy.delivery.probe=null"]
    assert command[-3] == "data.seed=3"
    assert command[-4] == f"actor_rollout_ref.model.path='{run.START_MODEL}'"
    assert run.build_run(plan["in_step-3"])[1] == {}
    alongside = set(by_name["late"].overrides) ^ set(by_name["in_step"].overrides)
    assert alongside == {"offpolicy.alarms.mismatch_growth.action=off"}
    assert set(by_name["late_opsm"].overrides) - set(by_name["late"].overrides) == {
        "correction=opsm",
        "correction.masks.opsm.delta=0.1",
    }


def test_the_list_names_each_run_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(list(arms.list_runs())) + 1
    assert all(
        re.match(rf"{each.name} +[\w ]*\d+ s ", line) for each, line in zip(arms.list_runs(), printed[:-1], strict=True)
    )
    assert "hours on two idle cores" in printed[-1]
    with pytest.raises(SystemExit, match="late_opsn: unknown"):
        run.main(["late_opsn"])


def quickstart(monkeypatch: pytest.MonkeyPatch, root: Path, steps: int = 0, end: str = "exit 0") -> None:
    """A quickstart that logs as many steps and ends so."""
    (root / "scripts").mkdir()
    said = ""
    if steps:
        (root / "run").mkdir()
        lines: list[dict[str, Any]] = [{"step": 0, "data": {EXACT: 0.1, GRADED: 0.4}}]
        lines += [{"step": s, "data": {"actor/grad_norm": 1.0, "offpolicy/kl/k3": 0.5}} for s in range(1, steps + 1)]
        lines[-1]["data"] |= {EXACT: 0.7}
        (root / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        said = "echo everything goes to run\n"
    (root / "scripts" / "quickstart.sh").write_text(f"{said}{end}\n")
    monkeypatch.setattr("scripts.harness.ROOT", root)
    monkeypatch.setattr(run, "build_run", lambda each: ([], {}))


def test_a_finished_run_is_kept_and_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart(monkeypatch, tmp_path, 80)
    run.main(["late-2"])
    assert "late-2: finished, 80 steps" in capsys.readouterr().out
    table = results.read()
    assert set(table["verl"]) == {run.describe_code()["verl"]}
    assert (len(table), set(table["outcome"]), table["exact"].count()) == (81, {"finished"}, 2)
    run.main(["late-2"])
    assert capsys.readouterr().out == ""
    run.main(["late-2", "--list"])
    assert f"late-2 {'':19} finished in {table['wall_seconds'].iloc[0]:.0f} s" in capsys.readouterr().out


def test_a_run_that_dies_counts_and_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path) -> None:
    quickstart(monkeypatch, tmp_path, 30, "exit 1")
    run.main(["late-2"])
    table = results.read()
    assert set(table["outcome"]) == {"ended with 1"}
    assert analyse.outcomes(table, "late").loc[2, "outcome"] == 0.0


def test_a_run_that_logged_nothing_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path) -> None:
    quickstart(monkeypatch, tmp_path, end="exit 1")
    run.main(["late-2"])
    assert not away.exists()


def test_a_run_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path) -> None:
    quickstart(monkeypatch, tmp_path, end="sleep 60")
    monkeypatch.setattr(run, "LIMIT", 0.001)
    assert "time limit" in run.make(next(iter(arms.list_runs())))


def test_a_run_that_the_machine_ended_is_listed_and_made_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path
) -> None:
    """Short of memory twice, the second time it counts."""
    quickstart(monkeypatch, tmp_path, 30, "exit 1")
    (tmp_path / "run" / "train.log").write_text(f"(raylet) 4 Workers {run.SHORT_OF_MEMORY}, 0 crashed\n")
    run.main(["late-2"])
    noted = pandas.read_csv(tmp_path / "machine_failures.csv")
    assert noted[["arm", "seed", "outcome", "steps"]].values.tolist() == [["late", 2, "out of memory", 30]]
    assert not away.exists()
    run.main(["late-2"])
    assert set(results.read()["outcome"]) == {"out of memory"}
    assert analyse.outcomes(results.read(), "late").loc[2, "outcome"] == 0.0
    assert len(pandas.read_csv(tmp_path / "machine_failures.csv")) == 1


def test_a_run_ends_with_the_command_that_is_terminated(tmp_path: Path) -> None:
    """Nothing is kept of it, so that it is made again."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "quickstart.sh").write_text("echo $$; exec sleep 60\n")
    program = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from pathlib import Path; from collapse import results, run; import scripts.harness as harness\n"
        f"results.DATA, run.LOGS = Path({str(tmp_path / 'results.parquet')!r}), Path({str(tmp_path / 'logs')!r})\n"
        f"harness.ROOT = Path({str(tmp_path)!r}); run.build_run = lambda each: ([], {{}})\n"
        "run.unwind_when_terminated(); run.main(['late-2'])\n"
    )
    log = tmp_path / "logs" / "late-2.log"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not (log.exists() and log.read_text().strip()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
    assert not (tmp_path / "results.parquet").exists()


def test_time_that_does_not_suffice_for_a_run_begins_none(
    monkeypatch: pytest.MonkeyPatch, away: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "make", lambda each: pytest.fail("began"))
    run.main(["--hours", "0.01"])
    assert capsys.readouterr().out == ""


def test_every_run_starts_from_the_committed_weights(tmp_path: Path) -> None:
    """A folder as the quickstart makes it, and these in it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.find_start_model(tmp_path / "model")
    model, weights = AutoModelForCausalLM.from_pretrained(folder), load_file(results.START_WEIGHTS)
    loaded = model.state_dict()
    assert set(weights) <= set(loaded)
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert max(AutoTokenizer.from_pretrained(folder).encode("Spell this word")) < model.config.vocab_size
