"""A report that follows a run: written after each step, read once by step, ended by Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.offpolicy.analysis.report import report_page as module
from recipe.offpolicy.analysis.report.report_page import follow
from tests.support.recordings import drawn_rows, record


def grow(run: Path) -> Iterator[None]:
    """Adds a step, another rank's rows of it, nothing, and a step, then interrupts."""
    record(run, drawn_rows([20] * 8, step=1))
    yield
    record(run, drawn_rows([20] * 4, step=1, rank=1))
    yield
    yield
    record(run, drawn_rows([20] * 8, step=2))
    yield
    raise KeyboardInterrupt


def test_it_is_written_when_rows_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out, said = tmp_path / "run", tmp_path / "page.html", list[str]()
    summarized = []
    plain = module.summarize_steps
    monkeypatch.setattr(module, "summarize_steps", lambda steps: summarized.append(steps.steps) or plain(steps))
    growth = grow(run)
    waits = []

    def wait(seconds: float) -> None:
        waits.append((seconds, out.exists()))
        next(growth)

    with pytest.raises(KeyboardInterrupt):
        follow(run, out, 7, said.append, wait)
    assert said[0].startswith("Waiting for the first step.")
    assert [re.sub(r"[\d,]+ bytes", "N bytes", line) for line in said[1:]] == [
        f"{out}: N bytes. Read: the one recorded step (1 to 1).",
        f"{out}: N bytes. Read: the one recorded step (1 to 1).",
        f"{out}: N bytes. Read: all 2 recorded steps (1 to 2).",
    ]
    assert summarized == [[1], [1], [2]]
    assert waits == [(7, False), (7, True), (7, True), (7, True), (7, True)]
    page = out.read_text()
    assert '<meta http-equiv="refresh" content="7">' in page
    assert "20 responses" in page
    assert "Does the reward rise?" in page
    assert "Where the mismatch comes from" not in page


def test_the_command_ends_by_an_interrupt(tmp_path: Path) -> None:
    run = record(tmp_path / "run", drawn_rows([20] * 8, step=1))
    out = tmp_path / "page.html"
    command = [sys.executable, "-m", "recipe.offpolicy.report", str(run), "--out", str(out), "--follow", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "Read: the one recorded step" in process.stdout.readline()
        record(run, drawn_rows([20] * 8, step=2))
        assert "Read: all 2 recorded steps" in process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("seconds", ["0", "-1", "ten"])
def test_other_numbers_of_seconds_are_refused(seconds: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipe.offpolicy.report", str(tmp_path), f"--follow={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"'{seconds}' is not a count of 1 or more" in done.stderr
