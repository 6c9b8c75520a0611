"""The interpreter's values, known and unknown, its state and exceptions, and the budget for reading one script."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

COMMANDS = 20_000
BYTES = 2**23
FIELD = 64
"""Number of bytes counted for each word in addition to its characters."""

WORDS = 5000
"""Largest number of words in one command."""
PATTERN = 4096
"""Largest number of characters in a pattern, an expression, or a value that a pattern cuts or changes."""


class OverBudget(Exception):
    """A script takes too long or is too large to read; not a ValueError, which commands turn into an unknown value."""


@dataclass
class Budget:
    """The remaining budget for reading one script, shared by all of its states.

    Attributes:
        commands: number of commands that may still be run.
        bytes: number of bytes that may still be used for words, values and documents together.
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

        Only a program's main thread can receive the signal; in other threads, only commands and bytes are limited.
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


class ScriptError(ValueError):
    """A script cannot be read; the message names file, line and cause."""


class ScriptEnd(Exception):
    """Raised by exit, return and exec: the following commands are not reached.

    Args:
        name: the command.
        line: its line in the script.
        status: the status given to the command; "" if there is none.

    Attributes:
        because: the condition under which the command runs, as written; "" if there is none.
        unset: the unset variables in the condition; "1" stands for any argument of the script.
    """

    def __init__(self, name: str, line: int, status: str = "") -> None:
        super().__init__(name)
        self.name, self.line, self.status = name, line, status
        self.because = ""
        self.unset: tuple[str, ...] = ()


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
        written: name -> the unexpanded text of its latest assignment.
        missing: files that the script tested but that do not exist here; they may exist on the launch machine.
        all_exist: answer as if every file existed.
        assumed: assumptions made while reading, as sentences without the full stop.
        budget: the budget for reading the script.
    """

    variables: dict[str, Value]
    arguments: list[Field]
    directory: Path
    script: Path
    functions: dict[str, object] = field(default_factory=dict)
    looked_at: set[Field] = field(default_factory=set)
    written: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    all_exist: bool = False
    assumed: list[str] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)

    def copy(self) -> ShellState:
        """Copy the state for a subshell; only variables, arguments and functions are separate in the copy."""
        values = {name: list(value) if isinstance(value, list) else value for name, value in self.variables.items()}
        self.budget.spend_bytes(8 * sum(len(each) if isinstance(each, list) else 1 for each in values.values()))
        return replace(self, variables=values, arguments=list(self.arguments), functions=dict(self.functions))
