"""What a script's words and variables are worth, as far as it can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


class ScriptError(ValueError):
    """A script that cannot be read; the message names file, line and cause."""


class Ends(Exception):
    """exit, return or exec: what follows is not reached."""


class Breaks(Exception):
    """break and continue."""


@dataclass(frozen=True)
class Unknown:
    """A value that only running the script would tell.

    Attributes:
        why: a sentence without its end, such as "$NODES is not set".
        line: of the script, where the value comes from.
        prefix: what of the word is known to stand before it, such as ``trainer.nnodes=``.
    """

    why: str
    line: int
    prefix: str = ""


Field = str | Unknown
"""One word after expansion."""
Value = str | Unknown | list[Field]
"""Of a variable: a list for an array."""


@dataclass
class State:
    """What a script has made of its world so far.

    Attributes:
        variables: of the script and of the environment.
        arguments: $1, $2 ...
        directory: where it is.
        functions: name -> parsed body.
        script: for messages and BASH_SOURCE.
    """

    variables: dict[str, Value]
    arguments: list[Field]
    directory: Path
    script: Path
    functions: dict[str, object] = field(default_factory=dict)

    def copy(self) -> State:
        values = {name: list(value) if isinstance(value, list) else value for name, value in self.variables.items()}
        return State(values, list(self.arguments), self.directory, self.script, dict(self.functions))
