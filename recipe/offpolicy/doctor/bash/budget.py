"""The budget for reading one script: commands, bytes and seconds, after which reading ends with a message."""

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
"""Bytes counted per word in addition to its characters."""

WORDS = 5000
"""Largest number of words in one command."""
PATTERN = 4096
"""Largest number of characters in a pattern, an expression, or a value that a pattern cuts or changes."""


class OverBudget(Exception):
    """A script takes too long or is too large to read; not a ValueError, which commands turn into an unknown value."""


@dataclass
class Budget:
    """The remaining budget of a reading, shared by all states of one script.

    Attributes:
        commands: remaining number of commands.
        bytes: remaining bytes for words, values and documents together.
        line: line of the latest command.
    """

    commands: int = COMMANDS
    bytes: int = BYTES
    line: int = 0

    def spend_command(self, line: int) -> None:
        """Count one command.

        Raises:
            OverBudget: the limit is exceeded.
        """
        self.line = line
        self.commands -= 1
        if self.commands < 0:
            raise OverBudget(f"line {line}: more than {COMMANDS} commands would run before the launch is reached.")

    def spend_bytes(self, count: int) -> None:
        """Count the characters of a value.

        Raises:
            OverBudget: the limit is exceeded.
        """
        self.bytes -= count
        if self.bytes < 0:
            raise OverBudget(f"line {self.line}: values and words exceed {BYTES} bytes.")

    @contextmanager
    def limit_seconds(self, seconds: float) -> Iterator[None]:
        """Raise OverBudget in the context after ``seconds``, even during a slow regular expression.

        Only a program's main thread can receive the signal; elsewhere commands and bytes are the limit.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            raise OverBudget(f"line {self.line}: reading the script takes more than {seconds:g} s.")

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
