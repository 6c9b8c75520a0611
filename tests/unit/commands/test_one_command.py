"""``offpolicy COMMAND``: every tool under one name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.offpolicy.__main__ import COMMANDS
from tests.support.paths import ROOT


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recipe.offpolicy", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


def complete(line: str, tmp_path: Path) -> list[str]:
    """What the shell is offered behind ``line``."""
    answer = tmp_path / "answer"
    call(
        _ARGCOMPLETE="1",
        _ARGCOMPLETE_STDOUT_FILENAME=str(answer),
        _ARGCOMPLETE_IFS="\n",
        COMP_LINE=line,
        COMP_POINT=str(len(line)),
    )
    return answer.read_text().split()


def test_it_names_all_tools_and_refuses_others() -> None:
    assert set(re.findall(r"^ +([a-z-]+)(?: |$)", call("--help").stdout, re.MULTILINE)) >= set(COMMANDS)
    other = call("atribute")
    assert other.returncode == 2
    assert "'attribute'" in other.stderr


@pytest.mark.parametrize("command", ["attribute", "pass-at-k", "doctor"])
def test_a_tool_has_its_own_arguments_and_exit_status(command: str) -> None:
    usage = call(command, "--help")
    assert usage.returncode == 0
    assert usage.stdout.startswith(f"usage: offpolicy {command}")
    assert call("attribute", "no-such-folder").returncode == 2


def test_it_completes_commands_and_options(tmp_path: Path) -> None:
    assert complete("offpolicy att", tmp_path) == ["attribute"]
    assert complete("offpolicy whatif --st", tmp_path) == ["--steps"]
    assert "areal" in complete("offpolicy translate --from a", tmp_path)
