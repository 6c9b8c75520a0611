"""The budget of one reading of a script: commands, bytes and seconds, after which the reading ends in words."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

COMMANDS = 20_000
BYTES = 2**23
FIELD = 64
"""Bytes that a word takes in addition to its characters."""

WORDS = 5000
"""Words that one command may have."""
PATTERN = 4096
"""Characters of a pattern or an expression, and of a value that is cut or changed by a pattern."""


class OverBudget(Exception):
    """A script that takes too long or too much to be read; no ValueError, which commands take for an unknown value."""


@dataclass
class Budget:
    """What is left of a reading, shared by all states of one script.

    Attributes:
        commands: that may still be run.
        bytes: that words, values and documents may still take in sum.
        line: of the latest command.
    """

    commands: int = COMMANDS
    bytes: int = BYTES
    line: int = 0

    def spend_command(self, line: int) -> None:
        """Count one command.

        Raises:
            OverBudget: it is one too many.
        """
        self.line = line
        self.commands -= 1
        if self.commands < 0:
            raise OverBudget(f"line {line}: more than {COMMANDS} commands would run before the launch is reached.")

    def spend_bytes(self, count: int) -> None:
        """Count the characters of a value.

        Raises:
            OverBudget: they are too many.
        """
        self.bytes -= count
        if self.bytes < 0:
            raise OverBudget(f"line {self.line}: values and words of more than {BYTES} bytes.")

    @contextmanager
    def limit_seconds(self, seconds: float) -> Iterator[None]:
        """End what runs inside by OverBudget after ``seconds``, a slow regular expression included.

        Only a program's main thread has the signal for it; elsewhere commands and bytes are the limit.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            raise OverBudget(f"line {self.line}: reading takes more than {seconds:g} s.")

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
