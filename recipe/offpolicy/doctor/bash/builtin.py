"""The bash builtins that change the interpreter's state."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

from .branches import Branches
from .conditions import Truth, evaluate_test
from .grammar import parse
from .programs import read_text
from .shell_values import Field, LoopBreak, ScriptEnd, ScriptError, Unknown, find_unknown

Builtin = Callable[[Branches, str, list[Field], int], Truth]
_ENVIRONMENT = re.compile(r"(^|/)(activate|conda\.sh|\.?(bashrc|bash_profile|profile|zshrc)|set(env|vars)\.sh)$")
"""Files that set up a shell or a program, such as those of conda, virtual environments, logins, CANN and oneAPI."""
DECLARING = ("export", "declare", "local", "readonly", "typeset")


def _do_echo(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    end = "\n"
    while name == "echo" and arguments and arguments[0] in ("-n", "-e", "-E"):
        end = "" if arguments[0] == "-n" else end
        arguments = arguments[1:]
    if name == "printf":
        form, *rest = arguments or [""]
        end = "\n" if form == "%s\\n" else ""
        arguments = rest[:1] if form in ("%s", "%s\\n", "%d") else [Unknown("this printf is not supported", line)]
    for index, argument in enumerate(arguments):
        if index:
            shell.print(" ")
        shell.print(argument)
    shell.print(end)
    return True


def _do_declare(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    for argument in arguments:
        name, equals, value = argument.partition("=") if isinstance(argument, str) else ("", "", "")
        if equals and name.isidentifier():
            shell.state.variables[name] = value
    return True


def _do_leave(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    raise ScriptEnd(name, line, str(arguments[0]) if arguments and isinstance(arguments[0], str) else "")


def _do_break(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    raise LoopBreak(name)


def _do_shift(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    count = int(arguments[0]) if arguments and isinstance(arguments[0], str) else 1
    enough = count <= len(shell.state.arguments)
    if enough:
        shell.state.looked_at.update(shell.state.arguments[:count])
        del shell.state.arguments[:count]
    return enough


def _do_set(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    """Replace the positional arguments after ``set --``; options are ignored."""
    if "--" in arguments:
        shell.state.arguments = arguments[arguments.index("--") + 1 :]
    return True


def _do_unset(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    for argument in arguments:
        shell.state.variables.pop(str(argument), None)
    return True


def _do_cd(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    """Change the directory; if the new directory is unknown, stop reading the script."""
    target = next((each for each in arguments if each != "--"), str(shell.state.variables.get("HOME", "")))
    if isinstance(target, Unknown):
        raise ScriptError(f"line {target.line}: {target.why}, but the script changes to this directory")
    shell.state.directory = (shell.state.directory / target).resolve()
    shell.state.variables["PWD"] = str(shell.state.directory)
    return True


def _do_pwd(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    shell.print(f"{shell.state.directory}\n")
    return True


def _do_bracket(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    return evaluate_test(arguments[: -1 if name == "[" else None], shell.state, line)


def _do_true(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    """Return the status of commands that change nothing; ``false`` fails, and ``: ${X:?}`` ends a script without X."""
    if any(isinstance(each, Unknown) and each.required for each in arguments):
        raise ScriptEnd("exit", line)
    return name != "false"


def _do_source(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    """Run a sourced file in the same state; if the file is missing or unreadable, mark the variables as unknown.

    A missing file that only sets up programs, such as a conda environment, is assumed to assign none of the script's
    variables.
    """
    shown = arguments[0] if arguments and isinstance(arguments[0], str) else "a file"
    path = shell.state.directory / shown
    try:
        commands = parse(read_text(path))
    except (OSError, ValueError) as error:
        if _ENVIRONMENT.search(shown) and not path.is_file():
            shell.state.assumed.append(f"line {line}: {shown} does not exist here, and is assumed to set no variable")
        else:
            _forget_variables(shell, Unknown(f"line {line} sources {shown}, which cannot be read ({error})", line))
        return True
    try:
        return shell.run(commands)
    except ScriptEnd as end:
        if end.name != "return":
            raise
        return True


def _do_eval(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    """Run the text of eval; if a part of the text is unknown, mark the variables as unknown."""
    if (unknown := find_unknown(arguments)) is not None:
        _forget_variables(shell, unknown)
        return True
    return shell.run_source(" ".join(map(str, arguments)), line)


def _do_read(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    """Mark the variables of read, mapfile or readarray as unknown."""
    why = Unknown(f"`{name}` reads the value from an input", line)
    for argument in arguments:
        if isinstance(argument, str) and argument.isidentifier():
            shell.state.variables[argument] = why
    return why


def _do_exec(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    """Record the program that exec runs, and end the script."""
    if arguments:
        shell.call(arguments, line)
        raise ScriptEnd(name, line)
    return True


def _do_command(shell: Branches, name: str, arguments: list[Field], line: int) -> Truth:
    """Run the command given as arguments; for ``command -v NAME``, print the path of NAME if it is installed here."""
    if arguments[:1] != ["-v"]:
        return shell.call(arguments, line) if arguments else True
    found = shutil.which(arguments[1]) if len(arguments) == 2 and isinstance(arguments[1], str) else None
    if found is not None:
        shell.print(f"{found}\n")
        return True
    why = Unknown("`command -v` looks for a program that is not installed here", line)
    shell.print(why)
    return why


def _forget_variables(shell: Branches, why: Unknown) -> None:
    """After unknown commands, mark all variables except a few environment variables as unknown."""
    shell.state.variables = {
        key: value if key in ("HOME", "PWD", "PATH", "USER") else why for key, value in shell.state.variables.items()
    }


_NAMES: dict[Builtin, str] = {
    _do_echo: "echo printf",
    _do_declare: " ".join(DECLARING),
    _do_leave: "exit return",
    _do_break: "break continue",
    _do_shift: "shift",
    _do_set: "set",
    _do_unset: "unset",
    _do_cd: "cd pushd",
    _do_pwd: "pwd",
    _do_bracket: "[ test",
    _do_true: "true false : trap ulimit shopt wait umask",
    _do_source: "source .",
    _do_eval: "eval",
    _do_read: "read mapfile readarray",
    _do_exec: "exec",
    _do_command: "command",
}
BUILTINS: dict[str, Builtin] = {name: builtin for builtin, names in _NAMES.items() for name in names.split()}
