"""The commands that bash has built in, as far as they change what a script knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .conditions import Condition, Truth
from .grammar import parsed
from .programs import text_of
from .values import Breaks, Ends, Field, ScriptError, Unknown

if TYPE_CHECKING:
    from .reader import Reader

    Builtin = Callable[[Reader, str, list[Field], int], Truth]

DECLARING = ("export", "declare", "local", "readonly", "typeset")


def do_echo(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    if reader.printed is None:
        return True
    end = "\n"
    while arguments and arguments[0] in ("-n", "-e", "-E"):
        end = "" if arguments[0] == "-n" else end
        arguments = arguments[1:]
    if name == "printf":
        form, *rest = arguments or [""]
        end = "\n" if form == "%s\\n" else ""
        arguments = rest[:1] if form in ("%s", "%s\\n", "%d") else [Unknown("printf is not read", line)]
    for index, argument in enumerate(arguments):
        reader.printed += [" ", argument] if index else [argument]
    reader.printed.append(end)
    return True


def do_declare(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    for argument in arguments:
        if isinstance(argument, str) and argument.partition("=")[0].isidentifier() and "=" in argument:
            key, _, value = argument.partition("=")
            reader.state.variables[key] = value
    return True


def do_leave(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    raise Ends(name, line, str(arguments[0]) if arguments and isinstance(arguments[0], str) else "")


def do_break(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    raise Breaks(name)


def do_shift(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    count = int(arguments[0]) if arguments and isinstance(arguments[0], str) else 1
    enough = count <= len(reader.state.arguments)
    if enough:
        reader.state.looked_at.update(reader.state.arguments[:count])
        del reader.state.arguments[:count]
    return enough


def do_set(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    if "--" in arguments:
        reader.state.arguments = arguments[arguments.index("--") + 1 :]
    return True


def do_unset(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    for argument in arguments:
        reader.state.variables.pop(str(argument), None)
    return True


def do_cd(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    target = next((each for each in arguments if each != "--"), str(reader.state.variables.get("HOME", "")))
    if isinstance(target, Unknown):
        raise ScriptError(f"line {target.line}: {target.why}, and the script changes its directory by it")
    reader.state.directory = (reader.state.directory / target).resolve()
    reader.state.variables["PWD"] = str(reader.state.directory)
    return True


def do_pwd(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    return reader.looked(f"{reader.state.directory}\n", True)


def do_bracket(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    return Condition(arguments[: -1 if name == "[" else None], reader.state, line).holds()


def do_true(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    return name != "false"


def do_source(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    path = reader.state.directory / arguments[0] if arguments and isinstance(arguments[0], str) else None
    if path is None or not path.is_file():
        shown = arguments[0] if arguments and isinstance(arguments[0], str) else "what it sources"
        forget(reader, Unknown(f"line {line} sources {shown}, which is not there", line))
        return True
    try:
        commands = parsed(text_of(path))
    except (OSError, ValueError) as error:
        forget(reader, Unknown(f"line {line} sources {path}, which is not read ({error})", line))
        return True
    try:
        return reader.run(commands)
    except Ends as end:
        if str(end) != "return":
            raise
        return True


def do_eval(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    texts = [each for each in arguments if isinstance(each, str)]
    if len(texts) < len(arguments):
        forget(reader, next(each for each in arguments if isinstance(each, Unknown)))
        return True
    return reader.run(parsed(" ".join(texts), line))


def do_read(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    why = Unknown(f"`{name}` takes it from an input", line)
    for argument in arguments:
        if isinstance(argument, str) and argument.isidentifier():
            reader.state.variables[argument] = why
    return why


def do_exec(reader: Reader, name: str, arguments: list[Field], line: int) -> Truth:
    if arguments:
        reader.call(arguments, line, "")
        raise Ends(name, line)
    return True


def forget(reader: Reader, why: Unknown) -> None:
    """After commands that are not known, no variable is."""
    reader.state.variables = {
        key: value if key in ("HOME", "PWD", "PATH", "USER") else why for key, value in reader.state.variables.items()
    }


BUILTINS: dict[str, Builtin] = {
    "echo": do_echo,
    "printf": do_echo,
    **dict.fromkeys(DECLARING, do_declare),
    "exit": do_leave,
    "return": do_leave,
    "break": do_break,
    "continue": do_break,
    "shift": do_shift,
    "set": do_set,
    "unset": do_unset,
    "cd": do_cd,
    "pushd": do_cd,
    "pwd": do_pwd,
    "[": do_bracket,
    "test": do_bracket,
    **dict.fromkeys(("true", "false", ":", "trap", "ulimit", "shopt", "wait", "umask"), do_true),
    "source": do_source,
    ".": do_source,
    "eval": do_eval,
    **dict.fromkeys(("read", "mapfile", "readarray"), do_read),
    "exec": do_exec,
}
