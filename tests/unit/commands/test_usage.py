"""``--help`` of every command and script: its usage and status 0, and nothing is started or made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), *(ROOT / "recipe" / "offpolicy").glob("*.sh")])
PROGRAMS = sorted(
    path
    for folder in ("recipe/offpolicy", "verl_patches")
    for path in (ROOT / folder).rglob("*.py")
    if "outputs" not in path.parts and "\nif __name__ ==" in path.read_text()
)
OF_THE_PROJECT = sorted(
    path
    for folder in ("benchmark", "evidence")
    for path in (ROOT / "scripts" / folder).rglob("*.py")
    if "\nif __name__ ==" in path.read_text()
)


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__main__" else parts)


def helped(command: list[str], cwd: Path, **variables: str) -> str:
    """What a command prints for ``--help``, once it is known to have made nothing."""
    before = set((ROOT / "outputs").rglob("*"))
    done = subprocess.run(
        [*command, "--help"],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(cwd), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(cwd.iterdir())
    assert set((ROOT / "outputs").rglob("*")) == before
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_shows_the_comment_at_its_top(script: Path, tmp_path: Path) -> None:
    comment = []
    for line in script.read_text().splitlines()[1:]:
        if not line.startswith("#"):
            break
        comment.append(line[2:])
    assert helped(["bash", str(script)], tmp_path).splitlines() == comment
    assert len(comment) > 5


def test_help_behind_the_submitted_command_is_the_commands(tmp_path: Path) -> None:
    """PYTHON stands for the interpreter that would submit it."""
    (tmp_path / "python").write_text('#!/bin/sh\nshift\necho "submitted: $*"\n')
    (tmp_path / "python").chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "launch_ray.sh"), "A=1"]
    (tmp_path / "cwd").mkdir()
    said = helped([*command, "train.sh"], tmp_path / "cwd", PYTHON=str(tmp_path / "python"))
    assert said == "submitted: A=1 train.sh --help\n"
    assert "launch_ray.sh [--no-wait]" in helped([*command, "--no-wait"], tmp_path / "cwd")


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=module)
def test_a_program_shows_its_usage_and_imports_nothing_that_takes_seconds(path: Path, tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "try:\n"
        f"    runpy.run_module({module(path)!r}, run_name='__main__', alter_sys=True)\n"
        "finally:\n"
        "    print(sorted({'hydra', 'numpy', 'ray', 'torch', 'verl'} & set(sys.modules)))\n"
    )
    *usage, imported = helped([sys.executable, "-c", code], tmp_path).splitlines()
    assert imported == "[]"
    assert f"python -m {module(path)}" in "\n".join(usage)
    assert len(usage) <= 40


def test_the_trainers_help_names_what_a_first_user_needs(tmp_path: Path) -> None:
    said = helped([sys.executable, "-m", "recipe.offpolicy.main_offpolicy"], tmp_path)
    for part in ("--check", "correction=", "recipe.offpolicy.doctor"):
        assert part in said
    assert "actor_rollout_ref" not in said


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("path", OF_THE_PROJECT, ids=lambda path: path.stem)
def test_a_script_in_python_shows_its_usage(path: Path, tmp_path: Path) -> None:
    assert path.name in helped([sys.executable, "-B", str(path)], tmp_path)
