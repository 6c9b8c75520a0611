"""The only entry point of the static Bash interpreter."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from .budget import OverBudget
from .interpreter import Interpreter
from .programs import read_text
from .shell_values import Field, ProgramCall, ScriptEnd, ScriptError, ShellState

_SECONDS = 20.0


@dataclass(frozen=True)
class Script:
    """The result of following a script.

    Attributes:
        calls: the programs that it would run, in order.
        looked_at: the script arguments that the script itself reads.
        end: how the script ends before its last line; None if it does not.
        assumed: assumptions about files that do not exist here.
    """

    calls: list[ProgramCall]
    looked_at: frozenset[Field]
    end: ScriptEnd | None
    assumed: tuple[str, ...] = ()


def read_script(path: Path, arguments: list[str], environment: dict[str, str]) -> Script:
    """Follow a script without running it.

    Args:
        arguments: arguments of the script.
        environment: its initial environment variables.

    Raises:
        ScriptError: the file is not a readable script; names file and line.
    """
    own = {"PWD": str(Path.cwd()), "UID": str(os.getuid()), "EUID": str(os.geteuid()), "HOSTNAME": platform.node()}
    state = ShellState({**environment, **own}, list(arguments), Path.cwd(), path)
    interpreter = Interpreter(state)
    try:
        with state.budget.limit_seconds(_SECONDS):
            source = read_text(path)
            if "\r\n" in source:
                line = source[: source.index("\r\n")].count("\n") + 1
                raise ScriptError(
                    f"line {line}: the line ends in a carriage return, which bash treats as a part of the last word. "
                    f"Fix: sed -i 's/\\r$//' {path}"
                )
            interpreter.run_script(source)
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ScriptError(f"{path}: not a text file ({error}).") from error
    except ScriptError as error:
        raise ScriptError(f"{path}, {str(error).rstrip('.')}.") from error
    except OverBudget as error:
        raise ScriptError(f"{path}, {error} Fix: check the launch itself, with its overrides.") from error
    except (IndexError, ValueError, RecursionError) as error:
        raise ScriptError(f"{path}: cannot be read: {error}.") from error
    assumed = tuple(dict.fromkeys(state.files.assumed))
    return Script(interpreter.calls, frozenset(state.looked_at), interpreter.end, assumed)
