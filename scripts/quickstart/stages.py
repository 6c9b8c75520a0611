"""Runs one stage of the quickstart as a child process, under a hard time limit and a stall limit."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TICK = 0.25
"""Seconds between two looks at a child."""


class StageFailed(RuntimeError):
    """The child ended with a status other than 0; its log says why."""


class OutOfTime(RuntimeError):
    """The run's hard time limit struck."""


class Stalled(RuntimeError):
    """Nothing was heard of the child for longer than the stall limit."""


@dataclass(frozen=True)
class Limits:
    """When to give up: at `deadline` by `clock`, or after `stall` seconds without a sign of life."""

    deadline: float
    stall: float
    clock: Callable[[], float] = time.monotonic


class Child:
    """A process in its own session, its output in a log file that is read line by line."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._reader = log.open("rb")
        self._rest = b""
        self._unread: list[str] = []

    def new_lines(self) -> list[str]:
        """Lines that have been completed since the last call."""
        *lines, self._rest = (self._rest + self._reader.read()).split(b"\n")
        unread, self._unread = self._unread, []
        return unread + [line.decode(errors="replace") for line in lines]

    def wait(
        self,
        limits: Limits,
        on_line: Callable[[str], None] = lambda line: None,
        on_tick: Callable[[], bool] = lambda: False,
        until: str = "",
    ) -> None:
        """Waits until the child ends, or says something.

        Args:
            on_line: gets each line of output.
            until: beginning of a line after which to return though the child goes on; the next call goes on there.
            on_tick: called every TICK seconds; True is a sign of life, as is any output.

        Raises:
            StageFailed, OutOfTime, Stalled.
        """
        heard = limits.clock()
        while True:
            ended = self.process.poll() is not None
            lines = self.new_lines()
            for number, line in enumerate(lines, start=1):
                on_line(line)
                if until and line.startswith(until):
                    self._unread = lines[number:]
                    return
            if on_tick() or lines:
                heard = limits.clock()
            if ended:
                break
            now = limits.clock()
            if now > limits.deadline:
                raise OutOfTime
            if now - heard > limits.stall:
                raise Stalled
            time.sleep(TICK)
        if self.process.returncode != 0:
            raise StageFailed(f"exit status {self.process.returncode}")

    def tail(self, count: int = 30) -> str:
        """The end of the log."""
        with self.log.open("rb") as file:
            file.seek(max(0, os.path.getsize(self.log) - 200_000))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(line.rsplit("\r", 1)[-1][:300] for line in lines[-count:])
