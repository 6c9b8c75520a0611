"""Tests are for releases of verl: which are left out, which must run, and marks that would run nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tests.support.paths import ROOT
from tests.support.release_marker import admits

pytestmark = pytest.mark.slow

MARKED = """
import pytest

@pytest.mark.verl("==0.7.1")
def test_old(): pass

@pytest.mark.verl(">=0.8")
def test_new(): pass

@pytest.mark.verl(">=0.7.1")
@pytest.mark.verl("<0.9")
def test_both_marks_count(): pass

def test_every(): pass
"""


def run(folder: Path, installed: str, *options: str, **modules: str) -> tuple[int, str]:
    """Return exit status and output of pytest for the modules, with a verl of that version in the environment."""
    info = folder / "site" / f"verl-{installed}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {installed}\n")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    path = f"{folder / 'site'}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["-p", "tests.support.release_marker", "-p", "no:cacheprovider", "--strict-markers", "-v", "-rs"]
    place = ["-c", os.devnull, "--rootdir", str(folder), str(folder)]
    command = [sys.executable, "-m", "pytest", *plugins, *options, *place]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("installed", "options", "expected"),
    [
        ("0.9.1", (), {"test_new", "test_every"}),
        ("0.7.1", ("--not-in", "0.9.1"), {"test_old", "test_both_marks_count"}),
    ],
)
def test_a_release_runs_its_tests_and_imports_no_module_of_others(
    installed: str, options: tuple[str, ...], expected: set[str], tmp_path: Path
) -> None:
    other = "import pytest\npytestmark = [pytest.mark.verl('==0.8.0')]\nimport not_there\n"
    status, out = run(tmp_path, installed, *options, test_marked=MARKED, test_other=other)
    assert status == 0, out
    assert set(re.findall(r"::(\w+) PASSED", out)) == expected
    assert f"{4 - len(expected)} deselected" in out
    assert "for other releases of verl: test_other.py" in out


@pytest.mark.parametrize(
    "module",
    [
        "@pytest.mark.verl('==0.7.1')\ndef test_it(): pytest.skip('no Megatron')\n",
        "pytestmark = pytest.mark.verl('==0.7.1')\npytest.skip('no Megatron', allow_module_level=True)\n",
    ],
)
def test_a_skip_where_the_test_must_run_is_a_failure(module: str, tmp_path: Path) -> None:
    status, out = run(tmp_path, "0.7.1", test_it="import pytest\n" + module)
    assert status != 0
    assert "must run there. " in out
    assert "no Megatron" in out


@pytest.mark.parametrize(
    ("arguments", "message"), [(("==0.7",), "no supported release"), ((), "not a version specifier")]
)
def test_a_mark_that_would_run_nowhere_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        admits(arguments, Version("0.7.1"), "here")
