"""Tests are for releases of verl: what is left out, what must run, and marks that would run nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

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


def run(folder: Path, installed: str | None, *options: str, **modules: str) -> tuple[int, str]:
    """Exit status and output of pytest over the modules, with a verl of that version or none in the environment."""
    site = folder / "site"
    if installed is not None:
        info = site / f"verl-{installed}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {installed}\n")
    else:
        site.mkdir()
        (site / "sitecustomize.py").write_text(
            "import importlib.metadata as m\n"
            "version = m.version\n"
            "def without(name):\n"
            "    if name == 'verl': raise m.PackageNotFoundError(name)\n"
            "    return version(name)\n"
            "m.version = without\n"
        )
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    path = f"{site}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["-p", "tests.support.release_marker", "-p", "no:cacheprovider", "--strict-markers", "-v", "-rs"]
    place = ["-c", os.devnull, "--rootdir", str(folder), str(folder)]
    command = [sys.executable, "-m", "pytest", *plugins, *options, *place]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ("0.7.1", {"test_old", "test_both_marks_count", "test_every"}),
        ("0.9.1", {"test_new", "test_every"}),
        (None, {"test_every"}),
    ],
)
def test_a_release_runs_its_tests_and_deselects_the_others(
    installed: str | None, expected: set[str], tmp_path: Path
) -> None:
    status, out = run(tmp_path, installed, test_marked=MARKED)
    assert status == 0, out
    assert set(re.findall(r"::(\w+) PASSED", out)) == expected
    assert f"{4 - len(expected)} deselected" in out
    assert "skipped" not in out


def test_a_module_for_another_release_is_not_imported(tmp_path: Path) -> None:
    module = "import pytest\npytestmark = [pytest.mark.verl('<0.9')]\nimport not_there\ndef test_it(): pass\n"
    status, out = run(tmp_path, "0.9.1", test_old=module, test_new="def test_it(): pass\n")
    assert status == 0, out
    assert "for other releases of verl: test_old.py" in out
    assert re.search(r"1 passed", out)
    (tmp_path / "again").mkdir()
    status, out = run(tmp_path / "again", "0.8.0", test_old=module)
    assert status == 2, "it is imported where it belongs"
    assert "not_there" in out


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
    assert "must run there" in out
    assert "no Megatron" in out
    (tmp_path / "unmarked").mkdir()
    unmarked = module.replace(".verl('==0.7.1')", ".usefixtures()")
    assert run(tmp_path / "unmarked", "0.7.1", test_it="import pytest\n" + unmarked)[0] in (0, 5)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("verl('==0.7')", "no supported release"),
        ("verl()", "not a version specifier"),
    ],
)
def test_a_mark_that_would_run_nowhere_is_refused(mark: str, message: str, tmp_path: Path) -> None:
    status, out = run(tmp_path, "0.7.1", test_it=f"import pytest\n@pytest.mark.{mark}\ndef test_it(): pass\n")
    assert status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
    assert message in out


def test_what_another_release_runs_too_can_be_left_out(tmp_path: Path) -> None:
    status, output = run(tmp_path, "0.7.1", "--not-in", "0.9.1", test_one=MARKED)
    assert status == 0
    assert set(re.findall(r"::(test_\w+) PASSED", output)) == {"test_old", "test_both_marks_count"}
