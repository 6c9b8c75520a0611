"""What the smoke test says of each way in which a step can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from scripts.fork.command import LAUNCH, ORIGINS, SMOKE_FAILED, explain
from tests.support.fork_copy import call, put
from tests.support.paths import ROOT

QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none")
TRACEBACK = 'Traceback (most recent call last):\n  File "/fork/verl/__init__.py", line 20, in <module>\n'


def ended(status: int, out: str, err: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], status, out, err)


def test_of_a_traceback_the_last_line_is_said() -> None:
    assert explain(ended(1, "a table\n", f"{TRACEBACK}ValueError: no\n")) == "ValueError: no"
    assert explain(ended(1, "one\n", "two\n")) == "two\none"
    assert explain(ended(3, "", "")) == "exit 3"


@pytest.fixture
def copied(fork: Path) -> Path:
    """A fork with a copy next to a submodule; its packages are empty."""
    empty = {"verl/__init__.py": "__version__ = '0.9.1'\n", "there/recipe/offpolicy/__init__.py": ""}
    put(fork, empty | {"there/verl_patches/__init__.py": ""})
    shutil.copy(ROOT / "verl_patches" / "releases.py", fork / "there" / "verl_patches")
    return fork


def find_origins(fork: Path, *before: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, [*before, fork / "there", fork]))
    command = [sys.executable, "-B", "-c", ORIGINS, "0.9.1", str(fork), "there/"]
    return subprocess.run(command, env={"PYTHONPATH": path}, cwd=fork, capture_output=True, text=True, check=False)


def test_what_is_imported_is_the_copy_and_the_forks_verl(copied: Path, tmp_path: Path) -> None:
    assert find_origins(copied).returncode == 0
    other = put(tmp_path / "other", {"verl_patches/__init__.py": ""})
    shutil.copy(ROOT / "verl_patches" / "releases.py", other / "verl_patches")
    found = explain(find_origins(copied, other))
    assert f"verl_patches was imported from {other}/verl_patches/__init__.py, not from {copied}/there" in found
    assert "Fix: VENV=path of an environment that has no verl_patches of its own" in found


def test_a_verl_that_says_another_release_than_its_file(copied: Path) -> None:
    put(copied, {"verl/__init__.py": "__version__ = '0.9.1+cpu'\n"})
    assert find_origins(copied).returncode == 0
    put(copied, {"verl/__init__.py": "__version__ = '0.8.0'\n"})
    found = explain(find_origins(copied))
    assert "verl says it is 0.8.0, its version file 0.9.1. Fix: make verl/__init__.py read" in found


def test_of_the_contracts_those_that_moved_are_said() -> None:
    moved = "worker_seams: patch 'ppo_loss': the target has moved. Fix: read the new target."
    assert explain(ended(1, "a table\n", f"UserWarning: something\n{moved}\n")) == moved


def test_an_update_that_is_not_live() -> None:
    said = "offpolicy: NOT LIVE through verl 0.9.1 in /fork/verl: it is the uncorrected one\n"
    assert explain(ended(1, "", said)) == said.strip()


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
    from hydra.core.global_hydra import GlobalHydra

    from recipe.offpolicy import main_offpolicy
    from recipe.offpolicy.doctor import doctor_command

    correction, *needed = LAUNCH
    # Of a group one choice counts.
    overrides = [override] if override.startswith("correction=") else [correction, *filter(None, [override])]
    status = doctor_command.main([*needed, *overrides])
    found = explain(ended(status, *capsys.readouterr()))
    assert (status == 0) == (not parts)
    assert all(part in found for part in parts), found
    monkeypatch.setattr(sys, "argv", ["main_offpolicy", "--check", *needed, *overrides, *QUIET])
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) if parts else nullcontext():
        main_offpolicy.main()
    GlobalHydra.instance().clear()


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
    assert f"failed at imports: {error}\n" in said
    assert "the copy stays until --undo. Fix: VENV=path of an environment that runs this checkout\n" in said
    assert "contracts" not in said
