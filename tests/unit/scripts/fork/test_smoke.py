"""What the smoke test reports for each way in which a step can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.fork.command import SMOKE_FAILED
from tests.support.fork_copy import call, put


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
