"""The programs that a script would run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .programs import text_of
from .reader import Called, Reader
from .values import Ends, Field, ScriptError, State


@dataclass(frozen=True)
class Script:
    """What a script was found to do.

    Attributes:
        calls: the programs that it would run, in order.
        looked_at: those of its arguments that it reads itself.
        end: by which it ends before its last line; None where it does not.
    """

    calls: list[Called]
    looked_at: frozenset[Field]
    end: Ends | None


def read_script(path: Path, arguments: list[str], environment: dict[str, str]) -> Script:
    """Follow a script without running it.

    Args:
        arguments: of the script.
        environment: variables that it starts with.

    Raises:
        ScriptError: the file is no script that can be read; names file and line.
    """
    state = State(dict(environment), list(arguments), Path.cwd(), path)
    reader = Reader(state)
    try:
        reader.script(text_of(path))
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ScriptError(f"{path}: not a text ({error}).") from error
    except ScriptError as error:
        raise ScriptError(f"{path}, {error}.") from error
    except (IndexError, ValueError, RecursionError) as error:
        raise ScriptError(f"{path}: not read: {error}.") from error
    return Script(reader.calls, frozenset(state.looked_at), reader.end)
