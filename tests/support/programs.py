"""Pytest plugin: runs real programs with a hard time limit and checks that they leave nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SUPERVISOR = ROOT / "tests" / "support" / "supervise.py"
CLEAN_UP_SECONDS = 300
LONGEST_WAIT = 900
"""Seconds within which the text that starts the time limit must be printed, as in supervise.py."""


@dataclass(frozen=True)
class Finished:
    """A program that has ended.

    Attributes:
        returncode: its exit status; negative for a signal.
        timed_out: whether the limit struck.
        lingering: processes that it started and that did not end soon after it; they have been killed.
        leaked: its segments in /dev/shm that no process used any more; they have been removed.
        output: its standard output and error together.
    """

    returncode: int
    timed_out: bool
    lingering: list[str]
    leaked: list[str]
    output: str


Runner = Callable[..., Finished]


@pytest.fixture
def run_program(tmp_path: Path) -> Iterator[Runner]:
    """A function (command, *, limit, after=None, may_leave=False, cwd=tmp_path, **environment) -> Finished.

    The limit in seconds counts from when the program has printed the text `after`, or from its start. It fails the
    test when the program left processes or shared memory behind, unless `may_leave`. One program at a time on a
    machine: Ray and vLLM take all of its cores.
    """

    def run(
        command: Sequence[str],
        *,
        limit: float,
        after: str | None = None,
        may_leave: bool = False,
        cwd: Path = tmp_path,
        **environment: str,
    ) -> Finished:
        log, report = tmp_path / "output.log", tmp_path / "report.json"
        report.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        condition = [] if after is None else ["--after", after, str(log)]
        with log.open("wb") as sink:
            supervisor = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), *condition, str(limit), str(report), *command],
                cwd=cwd,
                env={**os.environ, "PYTHONPATH": path, **environment},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            try:
                supervisor.wait(limit + (LONGEST_WAIT if condition else 0) + CLEAN_UP_SECONDS)
            finally:
                supervisor.terminate()
                supervisor.wait(CLEAN_UP_SECONDS)
        output = log.read_text(errors="replace")
        assert report.exists(), f"the supervisor failed:\n{output[-2000:]}"
        finished = Finished(**json.loads(report.read_text()), output=output)
        if not may_leave:
            assert finished.lingering == [], "processes outlived their run"
            assert finished.leaked == [], "shared memory outlived its run"
        return finished

    # All checkouts on this machine share the lock.
    with (Path(tempfile.gettempdir()) / "ray_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield run
