"""What the smoke test says of each way in which a step can fail."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from recipe.offpolicy import main_offpolicy
from recipe.offpolicy.doctor import command
from scripts.fork import smoke
from scripts.fork.checkout import Fork
from scripts.fork.command import SMOKE_FAILED
from scripts.fork.smoke import Ended, Failure, failed, judge_contracts, judge_doctor, judge_origins, judge_update
from tests.support.fork_copy import call, put

QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none")
FORK = Fork(Path("/fork"), "0.9.1")
TRACEBACK = 'Traceback (most recent call last):\n  File "/fork/verl/__init__.py", line 20, in <module>\n'


def test_a_missing_package_is_named_without_a_traceback() -> None:
    error = f"{TRACEBACK}ModuleNotFoundError: No module named 'packaging.version'\n"
    expected = Failure("packaging is not installed", "VENV=path of an environment that has packaging")
    assert judge_origins(Ended(1, "", error), FORK) == expected


def test_a_module_that_the_fork_lacks_is_no_matter_of_the_environment() -> None:
    found = failed(Ended(1, "", f"{TRACEBACK}ModuleNotFoundError: No module named 'verl.workers.engine'\n"), "x")
    assert found is not None
    assert found.reason == "there is no verl.workers.engine"
    assert "VENV" not in found.fix


def test_of_a_traceback_the_last_line_is_said() -> None:
    assert failed(Ended(1, "", f"{TRACEBACK}ValueError: no\n"), "mend it") == Failure("ValueError: no", "mend it")
    assert failed(Ended(1, "one\n", "two\n"), "mend it") == Failure("one\ntwo", "mend it")
    assert failed(Ended(0, "", "a warning\n"), "mend it") is None
    warned = f"UserWarning: No module named 'apex'\n{TRACEBACK}ModuleNotFoundError: No module named 'apex'\n{TRACEBACK}"
    assert failed(Ended(1, "", f"{warned}KeyError: 'actor'\n"), "mend it") == Failure("KeyError: 'actor'", "mend it")


def test_another_package_in_the_place_of_the_copy() -> None:
    said = ["/other/verl/__init__.py", "/fork/recipe/offpolicy/__init__.py", "/fork/verl_patches/__init__.py", "0.9.1"]
    found = judge_origins(Ended(0, f"a warning\n{json.dumps(said)}\n", ""), FORK)
    assert found is not None
    assert "verl was imported from /other/verl/__init__.py, not from /fork/verl" in found.reason
    said[0] = "/fork/verl/__init__.py"
    assert judge_origins(Ended(0, json.dumps(said), ""), FORK) is None
    tag = Fork(Path("/fork"), "0.8.0")
    assert judge_origins(Ended(0, json.dumps([*said[:3], "0.8.0.dev"]), ""), tag) is None


def test_of_the_contracts_those_that_moved_are_said() -> None:
    moved = "engine_loss: patch 'ppo_loss': the target has moved. Fix: read the new target."
    found = judge_contracts(Ended(1, "a table\n", f"UserWarning: something\n{moved}\n"), FORK)
    assert found is not None
    assert found.reason == moved
    assert "VENV" not in found.fix


def test_an_update_that_is_not_live() -> None:
    said = "offpolicy: NOT LIVE through verl 0.9.1 in /fork/verl: it is the uncorrected one\n"
    found = judge_update(Ended(1, "", said), FORK)
    assert found is not None
    assert "it is the uncorrected one" in found.reason
    assert "verl/workers/utils/losses.py" in found.fix


NO_MU = "actor_rollout_ref.rollout.calculate_log_probs=false"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("", []),
        ("correction.masks.gsm.upper=0.9", ["correction.masks.gsm"]),
        (NO_MU, [f"{NO_MU}: ", "Set it to true."]),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=2048", ["verl's own validation refuses it"]),
        ("correction=[gsm,gsm2]", ["gsm2"]),
    ],
)
def test_what_stops_a_launch_fails_the_smoke_test(
    override: str, parts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    correction, *needed = smoke.LAUNCH
    # Of a group one choice counts.
    overrides = [override] if override.startswith("correction=") else [correction, *filter(None, [override])]
    status = command.main(["--json", *needed, *overrides])
    out = capsys.readouterr().out
    release = (json.loads(out)["path"] or {"release": "0.9.1"})["release"]
    found = judge_doctor(Ended(status, out, ""), Fork(Path("/fork"), release))
    assert (found is None) == (not parts)
    assert found is None or all(part in found.reason for part in parts), found
    monkeypatch.setattr(sys, "argv", ["main_offpolicy", "--check", *needed, *overrides, *QUIET])
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) if parts else nullcontext():
        main_offpolicy.main()
    GlobalHydra.instance().clear()


def test_another_verl_than_the_forks_is_no_success() -> None:
    said: dict[str, Any] = {"error": None, "path": {"release": "0.8.0"}, "verdict": "LIVE", "corrections": []}
    found = judge_doctor(Ended(0, json.dumps(said), ""), FORK)
    assert found is not None
    assert found.reason == "it looked at verl 0.8.0, not 0.9.1"


def test_each_step_is_named_before_it_runs_and_the_first_failure_ends_it(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "ModuleNotFoundError: No module named 'packaging'"
    put(fork.parent, {"python": f'#!/bin/sh\necho "{error}" >&2\nexit 1\n'})
    program = fork.parent / "python"
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert call(fork) == SMOKE_FAILED
    said = capsys.readouterr().out
    assert "\n    imports         FAILED" in said
    assert "failed at imports: packaging is not installed\n" in said
    assert "the copy stays, until --undo. Fix: VENV=path of an environment that has packaging\n" in said
    assert "contracts" not in said
