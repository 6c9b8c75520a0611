"""Bash's builtin commands, insofar as they change the interpreter's state."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Protocol

from .conditions import Truth, evaluate_test
from .grammar import Command
from .programs import read_text
from .shell_values import Field, LoopBreak, ScriptEnd, ScriptError, ShellState, Unknown, find_unknown


class Shell(Protocol):
    """Shell state and functions that builtin commands use; see ``interpreter.Interpreter``."""

    state: ShellState
    printed: list[Field] | None

    def parse(self, source: str, first_line: int = 1) -> list[Command]: ...
    def run(self, commands: list[Command]) -> Truth: ...
    def call(self, words: list[Field], line: int, given: Field) -> Truth: ...
    def print_known(self, printed: str, succeeded: bool) -> Truth: ...
    def print_unknown(self, why: str, line: int) -> Unknown: ...


Builtin = Callable[[Shell, str, list[Field], int], Truth]
_ENVIRONMENT = re.compile(r"(^|/)(activate|conda\.sh|\.?(bashrc|bash_profile|profile|zshrc)|set(env|vars)\.sh)$")
"""Files that set up a shell or a program, such as those of conda, virtual environments, logins, CANN and oneAPI."""
DECLARING = ("export", "declare", "local", "readonly", "typeset")


def _do_echo(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Collect the output of echo or printf inside a substitution or a pipe."""
    if shell.printed is None:
        return True
    end = "\n"
    while arguments and arguments[0] in ("-n", "-e", "-E"):
        end = "" if arguments[0] == "-n" else end
        arguments = arguments[1:]
    if name == "printf":
        form, *rest = arguments or [""]
        end = "\n" if form == "%s\\n" else ""
        arguments = rest[:1] if form in ("%s", "%s\\n", "%d") else [Unknown("this printf is not supported", line)]
    for index, argument in enumerate(arguments):
        shell.printed += [" ", argument] if index else [argument]
    shell.printed.append(end)
    return True


def _do_declare(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Assign the values of export, declare, local, readonly or typeset."""
    for argument in arguments:
        name, equals, value = argument.partition("=") if isinstance(argument, str) else ("", "", "")
        if equals and name.isidentifier():
            shell.state.variables[name] = value
    return True


def _do_leave(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """End the script or function: exit and return."""
    raise ScriptEnd(name, line, str(arguments[0]) if arguments and isinstance(arguments[0], str) else "")


def _do_break(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Leave or continue a loop: break and continue."""
    raise LoopBreak(name)


def _do_shift(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Drop leading positional arguments; return False if there are fewer."""
    count = int(arguments[0]) if arguments and isinstance(arguments[0], str) else 1
    enough = count <= len(shell.state.arguments)
    if enough:
        shell.state.looked_at.update(shell.state.arguments[:count])
        del shell.state.arguments[:count]
    return enough


def _do_set(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Replace the positional arguments after ``set --``; options are ignored."""
    if "--" in arguments:
        shell.state.arguments = arguments[arguments.index("--") + 1 :]
    return True


def _do_unset(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Remove variables."""
    for argument in arguments:
        shell.state.variables.pop(str(argument), None)
    return True


def _do_cd(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Change the directory; if the new directory is unknown, stop reading the script."""
    target = next((each for each in arguments if each != "--"), str(shell.state.variables.get("HOME", "")))
    if isinstance(target, Unknown):
        raise ScriptError(f"line {target.line}: {target.why}, but the script changes to this directory")
    shell.state.directory = (shell.state.directory / target).resolve()
    shell.state.variables["PWD"] = str(shell.state.directory)
    return True


def _do_pwd(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Print the directory."""
    return shell.print_known(f"{shell.state.directory}\n", True)


def _do_bracket(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Evaluate ``[ ... ]`` or ``test``."""
    return evaluate_test(arguments[: -1 if name == "[" else None], shell.state, line)


def _do_true(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Return the status of commands that change nothing; ``false`` fails, and ``: ${X:?}`` ends a script without X."""
    missing = next((each for each in arguments if isinstance(each, Unknown) and each.required), None)
    if missing is not None:
        end = ScriptEnd("exit", line)
        end.because = f"${missing.unset}"
        raise end
    return name != "false"


def _do_source(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Run a sourced file in the same state; if the file is missing or unreadable, mark the variables as unknown.

    A missing file that only sets up programs, such as a conda environment, is assumed to assign none of the script's
    variables.
    """
    shown = arguments[0] if arguments and isinstance(arguments[0], str) else "a file"
    path = shell.state.directory / shown
    try:
        commands = shell.parse(read_text(path))
    except (OSError, ValueError) as error:
        if _ENVIRONMENT.search(shown) and not path.is_file():
            shell.state.assumed.append(f"line {line}: {shown} does not exist here, and is assumed to set no variable")
        else:
            _forget_variables(shell, Unknown(f"line {line} sources {shown}, which cannot be read ({error})", line))
        return True
    try:
        return shell.run(commands)
    except ScriptEnd as end:
        if str(end) != "return":
            raise
        return True


def _do_eval(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Run the text of eval; if a part of the text is unknown, mark the variables as unknown."""
    if (unknown := find_unknown(arguments)) is not None:
        _forget_variables(shell, unknown)
        return True
    return shell.run(shell.parse(" ".join(map(str, arguments)), line))


def _do_read(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Mark the variables of read, mapfile or readarray as unknown."""
    why = Unknown(f"`{name}` reads the value from an input", line)
    for argument in arguments:
        if isinstance(argument, str) and argument.isidentifier():
            shell.state.variables[argument] = why
    return why


def _do_exec(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Record the program that exec runs, and end the script."""
    if arguments:
        shell.call(arguments, line, "")
        raise ScriptEnd(name, line)
    return True


def _do_command(shell: Shell, name: str, arguments: list[Field], line: int) -> Truth:
    """Run the command given as arguments; for ``command -v NAME``, print the path of NAME if it is installed here."""
    if arguments[:1] != ["-v"]:
        return shell.call(arguments, line, "") if arguments else True
    found = shutil.which(arguments[1]) if len(arguments) == 2 and isinstance(arguments[1], str) else None
    if found is not None:
        return shell.print_known(f"{found}\n", True)
    return shell.print_unknown("`command -v` looks for a program that is not installed here", line)


def _forget_variables(shell: Shell, why: Unknown) -> None:
    """After unknown commands, mark all variables except a few environment variables as unknown."""
    shell.state.variables = {
        key: value if key in ("HOME", "PWD", "PATH", "USER") else why for key, value in shell.state.variables.items()
    }


BUILTINS: dict[str, Builtin] = {
    "echo": _do_echo,
    "printf": _do_echo,
    **dict.fromkeys(DECLARING, _do_declare),
    "exit": _do_leave,
    "return": _do_leave,
    "break": _do_break,
    "continue": _do_break,
    "shift": _do_shift,
    "set": _do_set,
    "unset": _do_unset,
    "cd": _do_cd,
    "pushd": _do_cd,
    "pwd": _do_pwd,
    "[": _do_bracket,
    "test": _do_bracket,
    **dict.fromkeys(("true", "false", ":", "trap", "ulimit", "shopt", "wait", "umask"), _do_true),
    "source": _do_source,
    ".": _do_source,
    "eval": _do_eval,
    **dict.fromkeys(("read", "mapfile", "readarray"), _do_read),
    "exec": _do_exec,
    "command": _do_command,
}
