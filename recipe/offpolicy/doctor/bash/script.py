"""The programs that a script would run."""

from __future__ import annotations

from pathlib import Path

from .programs import text_of
from .reader import Called, Reader
from .values import ScriptError, State


def read_script(path: Path, arguments: list[str], environment: dict[str, str]) -> list[Called]:
    """The programs that a script would run, in order.

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
    return reader.calls
