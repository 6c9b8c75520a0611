"""Every command: its help, missing packages, a reader that closes the pipe, and all tools under one name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.recordings import drawn_rows, record

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


@pytest.mark.parametrize(
    ("tool", "missing", "install"),
    [("report", ("pyarrow", "hydra"), "pyarrow hydra-core"), ("whatif", ("numpy",), "numpy")],
)
def test_packages_that_are_missing_are_one_line(
    tool: str, missing: tuple[str, ...], install: str, recording: Path
) -> None:
    """This includes packages that the tool's modules import at the top."""
    done = without(tool, missing, recording)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{tool}: not installed: {', '.join(missing)}. Fix: pip install {install}\n"


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
def test_a_reader_that_leaves_is_no_error(recording: Path) -> None:
    program = [sys.executable, "-m", "recipe.offpolicy.attribute", str(recording), "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in (1, 141)


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recipe.offpolicy", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


def complete(line: str, tmp_path: Path) -> list[str]:
    """Return the completions that the shell offers after ``line``."""
    answer = tmp_path / "answer"
    call(
        _ARGCOMPLETE="1",
        _ARGCOMPLETE_STDOUT_FILENAME=str(answer),
        _ARGCOMPLETE_IFS="\n",
        COMP_LINE=line,
        COMP_POINT=str(len(line)),
    )
    return answer.read_text().split()


def test_a_tool_has_its_own_arguments_and_exit_status() -> None:
    usage = call("pass-at-k", "--help")
    assert usage.returncode == 0
    assert usage.stdout.startswith("usage: offpolicy pass-at-k")
    assert call("attribute", "no-such-folder").returncode == 2


def test_it_completes_commands_and_options(tmp_path: Path) -> None:
    assert complete("offpolicy att", tmp_path) == ["attribute"]
    assert "areal" in complete("offpolicy translate --from a", tmp_path)


SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), *(ROOT / "recipe" / "offpolicy").glob("*.sh")])
PROGRAMS = sorted(
    path
    for folder in ("recipe/offpolicy", "verl_patches")
    for path in (ROOT / folder).rglob("*.py")
    if "outputs" not in path.parts and "\nif __name__ ==" in path.read_text()
)


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__main__" else parts)


def helped(command: list[str], cwd: Path, **variables: str) -> str:
    """Return what a command prints for ``--help``, after checking that it created no file."""
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
