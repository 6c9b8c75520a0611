"""The project and the checkout with which a test of copying begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fork_copy import PROJECT, commit, put


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project with the real project's structure, and with unrelated files."""
    root = put(tmp_path / "project", PROJECT)
    (root / "recipe" / "offpolicy" / "config").symlink_to("../../configs")
    (root / "recipe" / "offpolicy" / "run.sh").chmod(0o755)
    litter = {
        "recipe/offpolicy/__pycache__/main.cpython-311.pyc": "x",
        "recipe/offpolicy/outputs/log.txt": "x",
        "verl_patches/.hidden.py": "x",
        "verl_patches/core.dump": "x",
    }
    put(root, litter)
    monkeypatch.setattr("scripts.fork.command.SOURCE", root)
    return root


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A verl checkout in git, with a file of the user."""
    files = {"verl/__init__.py": "", "verl/version/version": "0.9.1\n", "mine.py": "mine\n"}
    return commit(put(tmp_path / "fork", files))
