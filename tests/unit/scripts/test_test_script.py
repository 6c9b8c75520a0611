"""scripts/test.sh: which tests run in which environment, and what it prints at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

# Stand-ins: the installer makes environments whose programs note how they were called.
INSTALL = """#!/usr/bin/env bash
echo "install $*" >>"$NOTES"
[[ $* == *"${FAIL_INSTALL:-none}" ]] && exit "${STATUS:-1}"
[[ $* == *"${HANG_INSTALL:-none}" ]] && sleep 600
mkdir -p "$1/bin"
cp stub "$1/bin/python"; cp stub "$1/bin/ruff"; cp stub "$1/bin/mypy"
"""
STUB = """#!/usr/bin/env bash
folder=$(basename "$(dirname "$(dirname "$0")")")
echo "$folder $(basename "$0") $*" >>"$NOTES"
if [[ $2 == pytest ]]; then
    echo "=== 1 passed in $folder ==="
    [[ $folder == "${FAIL_IN:-none}" ]] && exit 1
    [[ $folder == "${HANG_IN:-none}" ]] && exec sleep 600
fi
exit 0
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with every test folder, three releases, and stand-ins for the environments."""
    for folder in ("scripts", "requirements", "recipe/offpolicy", "tests/unit", "tests/contract", "tests/integration"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests" / "releases").mkdir()
    (tmp_path / "tests" / "unit" / "test_one.py").touch()
    (tmp_path / "recipe" / "offpolicy" / "module.py").touch()
    for release in ("0.7.1", "0.10.0", "0.9.1"):
        (tmp_path / "requirements" / f"verl-{release}.txt").touch()
    for name in ("test.sh", "lint.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "scripts" / "install_cpu.sh").write_text(INSTALL)
    (tmp_path / "scripts" / "docs.sh").write_text('"$PYTHON" docs\n')
    (tmp_path / "stub").write_text(STUB)
    (tmp_path / "stub").chmod(0o755)
    return tmp_path


def run(tree: Path, *arguments: str, **variables: str) -> tuple[int, list[str], list[str]]:
    """Return the exit status, the calls, and the printed lines."""
    kept = {key: value for key, value in os.environ.items() if key not in ("VENV", "TEST_LIMIT")}
    notes = tree / "notes"
    notes.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", "scripts/test.sh", *arguments],
        cwd=tree,
        env={**kept, "NOTES": str(notes), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    called = notes.read_text().splitlines() if notes.exists() else []
    # What runs side by side is noted in any order: environments by name, whole programs before what runs next to them.
    installs = sorted(call for call in called if call.startswith("install"))
    programs, others = ([call for call in called if f"-m {start}program" in call] for start in ("", "not "))
    rest = [call for call in called if call not in {*installs, *programs, *others}]
    return done.returncode, [*installs, *rest, *programs, *others], (done.stdout + done.stderr).splitlines()


OTHERS = "tests/releases tests/contract"
SIDE_BY_SIDE = "-n 2 --dist loadfile --no-loadscope-reorder"
ALONE = "--not-in 0.10.0 " + OTHERS
ALL = "tests/releases tests/contract tests/integration tests/unit"
DEFAULT = " and not extended"


def calls(folders: list[str], suites: list[str], selection: str = "", arguments: str = "") -> list[str]:
    """Return the calls of programs in turn, and those of everything else, which runs next to them in two processes."""
    pairs = list(zip(folders, suites, strict=True))
    return [
        *(
            f"{folder} python -m pytest --durations=0 --durations-min=20 -m program{selection} {arguments}{suite}"
            for folder, suite in pairs
        ),
        *(
            f"{folder} python -m pytest {SIDE_BY_SIDE} -m not program{selection} {arguments}{suite}"
            for folder, suite in pairs
        ),
    ]


LINT = [
    ".venv ruff check .",
    ".venv ruff format --check .",
    ".venv python -m tests.support.language",
    ".venv mypy recipe/offpolicy",
    ".venv python docs",
]


def test_the_default_covers_the_newest_release_and_the_oldest_ones_workers(tree: Path) -> None:
    status, called, lines = run(tree)
    assert status == 0
    assert called == [
        f"install {tree}/.venv --release 0.10.0",
        f"install {tree}/.venv-0.7.1 --release 0.7.1",
        *LINT,
        *calls([".venv", ".venv-0.7.1"], [ALL, ALONE], DEFAULT),
    ]
    summary = lines[lines.index("--- summary") + 1 :]
    stages = ["install-0.10.0", "install-0.7.1", "lint", "types", "docs"]
    stages += [f"{kind}-{release}" for release in ("0.7.1", "0.10.0") for kind in ("programs", "tests")]
    assert [line.split()[:2] for line in summary[:-4]] == [[name, "ok"] for name in stages]
    assert summary[-4:] == 2 * ["=== 1 passed in .venv-0.7.1 ==="] + 2 * ["=== 1 passed in .venv ==="]


@pytest.mark.parametrize("failing", [".venv", ".venv-0.7.1"])
def test_a_failure_in_any_release_fails_the_run(failing: str, tree: Path) -> None:
    status, called, lines = run(tree, FAIL_IN=failing)
    assert status == 1
    assert called[-4:] == calls([".venv", ".venv-0.7.1"], [ALL, ALONE], DEFAULT), "the others still run"
    assert len([line for line in lines if "FAILED (exit 1)" in line]) == 2
