"""What the smoke test says of each way in which a step can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fork.command import ORIGINS, SMOKE_FAILED, explain
from tests.support.fork_copy import call, put
from tests.support.paths import ROOT


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
