"""Tools without a package that they need, and tools whose reader leaves: one line, and none."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.offpolicy.command_line import add_jobs
from tests.support.recordings import drawn_rows, record

TOOLS = ("attribute", "calibrate", "report", "whatif")
CALIBRATED = ("--spec", "correction=gsm", "--target-kept", "0.9")
# A program as `python -m` runs it, where some packages are not installed.
WITHOUT = """
import importlib.abc, runpy, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = {argv!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("run"), drawn_rows([20] * 40))


def without(tool: str, missing: tuple[str, ...], *arguments: object) -> subprocess.CompletedProcess[str]:
    module = f"recipe.offpolicy.{tool}"
    code = WITHOUT.format(missing=set(missing), argv=[tool, *map(str, arguments)], module=module)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("tool", TOOLS)
def test_packages_that_are_missing_are_one_line(tool: str, recording: Path, tmp_path: Path) -> None:
    done = without(tool, ("pyarrow", "hydra"), recording)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{tool}: not installed: pyarrow, hydra. Fix: pip install pyarrow hydra-core\n"


@pytest.mark.parametrize("tool", ["calibrate", "whatif"])
def test_what_their_modules_import_at_once_is_said_too(tool: str, recording: Path) -> None:
    assert without(tool, ("numpy",), recording).stderr == f"{tool}: not installed: numpy. Fix: pip install numpy\n"


@pytest.mark.slow
def test_what_only_a_picture_takes_is_said_before_the_work_and_for_a_picture_alone(
    recording: Path, tmp_path: Path
) -> None:
    missing = ("rich", "matplotlib", "jinja2")
    done = without("attribute", missing, recording, "--png", tmp_path / "a.png", "--html", tmp_path / "a.html")
    names = "rich matplotlib jinja2"
    assert done.stderr == f"attribute: not installed: {names.replace(' ', ', ')}. Fix: pip install {names}\n"
    assert without("attribute", missing, recording, "--json").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("attribute", "--json"),
        *(
            pytest.param(each, marks=pytest.mark.extended)
            for each in (
                ("attribute",),
                ("calibrate", *CALIBRATED, "--json"),
                ("whatif", "--spec", "correction=gsm", "--json"),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_reader_that_leaves_is_no_error(command: tuple[str, ...], recording: Path) -> None:
    tool, *arguments = command
    program = [sys.executable, "-m", f"recipe.offpolicy.{tool}", str(recording), *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait()
    # What-if goes on to its files, and keeps its verdict; 1 where rich has noticed it first.
    assert process.returncode in ((0,) if tool == "whatif" else (1, 141))


def test_nor_is_it_behind_help() -> None:
    """Where Python keeps what is printed until the end, which PYTHONUNBUFFERED would change."""
    program = [sys.executable, "-m", "recipe.offpolicy.report", "--help"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(program, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_jobs_and_a_cluster_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_jobs(parser)
    assert vars(parser.parse_args([])) == {"jobs": None, "ray": None}
    assert parser.parse_args(["--jobs", "3"]).jobs == 3
    for wrong, said in (
        (["--jobs", "0"], "'0' is not a count of 1 or more"),
        (["--jobs", "1", "--ray", "a:1"], "not allowed"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
        assert said in capsys.readouterr().err
