"""The benchmark of the start-up tools: its medians, its worktree, and what a run is."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from scripts.benchmark import start_up
from scripts.benchmark.start_up import Run, check_out, describe, run
from tests.support.paths import ROOT

TOOLS = ["doctor", "--check", "launch, until Ray", "verl's own"]


def test_medians_of_columns_and_of_ratios() -> None:
    other, ours = [(4.0, 8.0), (6.0, 10.0), (5.0, 5.0)], [(1.0, 4.0), (3.0, 4.0), (2.0, 4.0)]
    runs = {"other": [Run(*each, "a") for each in other], "this": [Run(*each, "a") for each in ours]}
    assert describe("doctor", runs) == ["doctor", "5.0 and 2.0", "0.40", "8.0 and 4.0", "0.50", "yes"]
    assert describe("doctor", runs | {"this": [Run(*each, "b") for each in ours]})[-1] == "no"


def test_a_run_says_status_and_output_without_the_place_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import pathlib, sys\nsum(range(10**6))\nprint(pathlib.Path.cwd() / 'x', *sys.argv[1:])\n"
        "print('[2026-01-02 03:04:05,678][package][INFO] - imported')\nsys.exit(2)\n"
    )
    done = run(tmp_path, ["-m", "tool", "a=1"])
    assert done.said == "2\n/x a=1"
    assert done.cpu > 0
    assert done.wall > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "tool.py"]


def test_a_worktree_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e")
    subprocess.run([*git[:3], "init", "--quiet"], check=True)
    (tmp_path / "file").write_text("then")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "then"], check=True)
    (tmp_path / "file").write_text("today")
    monkeypatch.setattr(start_up, "ROOT", tmp_path)
    with check_out("HEAD") as place:
        assert (place / "file").read_text() == "then"
    assert not place.exists()
    listed = subprocess.run([*git, "worktree", "list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1


def test_the_table_has_a_row_for_each_tool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, tuple[str, ...]]] = []

    def answer(checkout: Path, command: list[str]) -> Run:
        asked.append((checkout, tuple(command)))
        return Run(1.0, 2.0, "same")

    monkeypatch.setattr(start_up, "run", answer)
    monkeypatch.setattr(start_up, "check_out", lambda revision: contextlib.nullcontext(Path(revision)))
    start_up.main(["HEAD", "--pairs", "2", "--script", "run.sh", "a=1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in (*TOOLS, "doctor --script")]
    assert [place for place, _ in asked] == [ROOT, Path("HEAD"), Path("HEAD"), ROOT] * 5
    assert asked[0][1] == ("-m", "recipe.offpolicy.doctor", "a=1")
    assert asked[4][1] == ("-m", "recipe.offpolicy.main_offpolicy", "--check", "a=1")


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's history")
def test_the_tools_of_a_revision_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("verl")
    start_up.main(["HEAD", "--pairs", "1"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == TOOLS
    assert [row[-1] for row in rows] == ["yes"] * 4
