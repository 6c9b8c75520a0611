"""Child process of one quickstart stage, with its log read while it is being written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_GUARD = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from scripts.quickstart import guard; guard.run()"
TICK = 0.25
"""Seconds between two looks at a child."""


class StageFailed(RuntimeError):
    """The child ended with a status other than 0; its log says why."""


class Tail:
    """Reads a growing file in instalments of whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        """Read the lines that have been completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line.decode(errors="replace") for line in whole.split(b"\n")[:-1]]


class Child:
    """A process in its own session, whose output goes to a log: its daemons would hold a pipe open after its end.

    It ends with this process, however that ends: see ``guard``.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _GUARD, str(os.getpid()), *command],
                env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def lines(self, on_tick: Callable[[], None] = lambda: None) -> Iterator[str]:
        """Yield each line of output until the child ends, and call `on_tick` every TICK seconds.

        Raises:
            StageFailed.
        """
        tail = Tail(self.log)
        while True:
            ended = self.process.poll() is not None
            yield from tail.new_lines()
            on_tick()
            if ended:
                break
            time.sleep(TICK)
        if self.process.returncode != 0:
            raise StageFailed(f"exit status {self.process.returncode}")

    def end_of_log(self, count: int) -> str:
        """Read the last lines of the log."""
        lines = self.log.read_text(errors="replace").split("\n")
        return "\n".join(line.rsplit("\r", 1)[-1][:300] for line in lines[-count - 1 :]).rstrip()
