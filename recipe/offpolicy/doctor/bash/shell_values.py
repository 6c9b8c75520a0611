"""The interpreter's values, known and unknown, its state and exceptions, and the limits of reading one script."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

COMMANDS = 20_000
"""Largest number of commands that are followed in one script."""
WORDS = 5000
"""Largest number of words in one command or array."""
LARGEST = 2**20
"""Largest size of a file that is read, of a program's output, and of a value."""
PATTERN = 4096
"""Largest number of characters in a pattern, an expression, or a value that a pattern cuts or changes."""


class OverBudget(Exception):
    """A script takes too long or is too large to read; not a ValueError, which commands turn into an unknown value."""


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise OverBudget in the context after ``seconds``, even during a slow regular expression.

    Only a program's main thread can receive the signal; in other threads, only commands and sizes are limited.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise OverBudget(f"reading the script takes more than {seconds:g} s.")

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


class ScriptError(ValueError):
    """A script cannot be read; the message names file, line and cause."""


class ScriptEnd(Exception):
    """Raised by exit, return and exec: the following commands are not reached.

    Args:
        name: the command.
        line: its line in the script.
        status: the status given to the command; "" if there is none.
    """

    def __init__(self, name: str, line: int, status: str = "") -> None:
        super().__init__(name)
        self.name, self.line, self.status = name, line, status


class LoopBreak(Exception):
    """Raised by break and continue."""


@dataclass(frozen=True)
class Unknown:
    """A value that is known only when the script runs.

    Attributes:
        why: a sentence without its full stop, such as "$NODES is not set".
        line: line of the script from which the value comes.
        prefix: known text before the value in the same word, such as ``trainer.nnodes=``.
        variable: the variable whose default value this is; if the environment sets the variable, the default is not
            used.
        unset: the unset variable that is the only cause; "" otherwise.
        required: whether an empty value would be an error, as in ${X:?}.
    """

    why: str
    line: int
    prefix: str = ""
    variable: str = ""
    unset: str = ""
    required: bool = False

    @property
    def may_be_empty(self) -> bool:
        """True if bash would replace the value with an empty text."""
        return bool(self.unset) and not self.required


Field = str | Unknown
"""A word after expansion."""
Value = str | Unknown | list[Field]
"""The value of a variable; a list for an array."""


def find_unknown(values: Iterable[Value]) -> Unknown | None:
    """Return the first unknown value; None if all are known."""
    return next((value for value in values if isinstance(value, Unknown)), None)


@dataclass(frozen=True)
class ProgramCall:
    """A program that the script would run.

    Attributes:
        words: the program and its arguments.
        line: its line in the script.
        doubt: why it is not known whether the program would run.
    """

    words: tuple[Field, ...]
    line: int
    doubt: Unknown | None = None


@dataclass
class ShellState:
    """The state of the shell that a script changes.

    Attributes:
        variables: variables of the script and of the environment.
        arguments: $1, $2 ...
        directory: current directory.
        functions: name -> parsed body.
        script: path, for messages and BASH_SOURCE.
        looked_at: values of $1, $2 ..., $@ and shift that the script itself reads.
        read: names of the variables that the script reads.
        unset: names of the variables that were unset or empty by default when read; "1" for any argument.
        missing: files that the script tested but that do not exist here; they may exist on the launch machine.
        assumed: assumptions made while reading, as sentences without the full stop.
    """

    variables: dict[str, Value]
    arguments: list[Field]
    directory: Path
    script: Path
    functions: dict[str, object] = field(default_factory=dict)
    looked_at: set[Field] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    unset: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def copy(self) -> ShellState:
        """Copy the state for a subshell; only variables, arguments and functions are separate in the copy."""
        values = {name: list(value) if isinstance(value, list) else value for name, value in self.variables.items()}
        return replace(self, variables=values, arguments=list(self.arguments), functions=dict(self.functions))
