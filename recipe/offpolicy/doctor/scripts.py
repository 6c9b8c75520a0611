"""Finds the training launch in a script with all of its arguments, or explains which arguments are unknown."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .bash.interpreter import Script, read_script
from .bash.programs import read_text
from .bash.shell_values import Field, ProgramCall, ScriptError, Unknown
from .program import Launch

KEY = re.compile(r"[+]{0,2}([\w./@-]+)=", re.S)


def describe_overrides(unknowns: Sequence[Unknown], script: Path) -> str:
    """Describe which overrides of a launch are unknown, why, and what to do."""
    keys = [found[1] for each in unknowns if (found := KEY.match(each.prefix))]
    few = "an override is" if len(unknowns) == 1 else f"{len(unknowns)} overrides are"
    named = f" ({', '.join(dict.fromkeys(keys))})" if keys else ""
    return f"{few} unknown{named}: {describe_unknowns(unknowns, script)}"


def describe_unknowns(unknowns: Sequence[Unknown], script: Path) -> str:
    """Describe why values are unknown, naming each cause only once, and how to determine the values."""
    lines: dict[str, int] = {}
    for each in unknowns:
        lines.setdefault(each.why, each.line)
    causes = [f"{why} (line {line})" for why, line in lines.items()]
    # ${X:?} does not allow an empty value.
    unset = {each.unset: not each.required for each in unknowns if each.unset}
    fixes = dict.fromkeys(
        filter(
            None,
            (
                *propose_exports(unset),
                _propose_in_front(unknowns),
                *_propose_values(unknowns, script),
            ),
        )
    )
    proposed = f" Fix: {', and '.join(fixes)}." if fixes else ""
    return f"{'; '.join(causes)}.{proposed}"


def propose_exports(names: Mapping[str, bool]) -> list[str]:
    """Suggest exporting variables (noting where bash accepts an empty value); for names like "1", suggest arguments."""
    as_empty = " (bash treats it as empty)"
    fixes = [f"export {name}=VALUE{as_empty * empty}" for name, empty in names.items() if not name.isdigit()]
    if any(name.isdigit() for name in names):
        fixes.append("give the script's arguments after --script FILE")
    return fixes


def _propose_in_front(unknowns: Sequence[Unknown]) -> str:
    names = dict.fromkeys(each.variable for each in unknowns if each.variable and not each.unset)
    return f"put {' '.join(f'{name}=VALUE' for name in names)} before the command" if names else ""


def _propose_values(unknowns: Sequence[Unknown], script: Path) -> list[str]:
    """Suggest values for keys that neither a variable nor an argument determines."""
    left = [each for each in unknowns if not each.variable and not each.unset]
    keys = dict.fromkeys(found[1] for each in left if (found := KEY.match(each.prefix)))
    values = " ".join(f"{key}=VALUE" for key in keys)
    return [f"to check the launch with your own values, add {values} after --script {script}"] if keys else []


_PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun)")
_UV = re.compile(r"(.*/)?uv")
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_LIKE_AN_OVERRIDE = re.compile(r"[+~]{0,2}[a-z_][\w/@-]*(\.[\w./@-]*)?=.*|~[a-z_][\w./@-]*", re.S)
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w/@-]*\.[\w./@-]*=.*|correction=.*", re.S)
_FREE_TEXT = re.compile(
    r"\+{0,2}(trainer\.(experiment|project)_name=.*|(trainer\.\w+_dir|[\w.]*\.\w*log_dir)=.+)", re.S
)
"""Overrides whose values no check reads; the run's name, or a folder below the first, may contain an unset variable."""
_NOUNSET = re.compile(r"^\s*set\s.*(-\w*u|nounset)|^#!.*\s-\w*u", re.M)
_FLAGS_WITH_VALUE = ("-W", "-X")
MOST = 20
"""Largest number of different launches of one script that are checked; each check takes a second or more."""
_DISTRIBUTORS = re.compile(r"(.*/)?(xargs|parallel)")


def find_launches(script: Path, arguments: list[str], line: int | None = None) -> list[Launch]:
    """Find the launches of a training program in a script: one, or one per loop iteration or function call.

    Args:
        arguments: arguments of the script. Overrides that the script does not pass on are added to the launch, and
            named in ``lost``; such an override also replaces a value that is known only when the script runs.
        line: line of the launch, if the script contains several.

    Raises:
        ScriptError: there is no launch, or there are several on different lines or too many on one line; or a word of a
            launch is unknown without running the script; or an argument other than an override has no effect. The
            message names the line and says what to do.
    """
    read, empty = _read(script, arguments, line)
    found = [
        (called, launch)
        for called in read.calls
        if line in (None, called.line) and (launch := _build_launch(called, script, arguments)) is not None
    ]
    assumed = (*read.assumed, *(f"${name} is not set, and bash treats it as empty" for name in empty))
    if not found:
        raise ScriptError(f"{script}: {_explain_no_launch(read, line)}")
    if len({launch.origin for _, launch in found}) > 1:
        lines = ", ".join(dict.fromkeys(f"{called.line} ({launch.module})" for called, launch in found))
        raise ScriptError(f"{script}: several launches, at lines {lines}. Choose one: --line {found[0][0].line}.")
    launches: dict[Launch, None] = {}
    for called, launch in found:
        where = f"{script}, line {called.line}"
        if called.doubt is not None:
            why = describe_unknowns([called.doubt], script)
            raise ScriptError(f"{where}: it is unknown whether the script reaches this launch: {why}")
        if taken := _find_taken(arguments, launch):
            argument, key = taken
            fix = f"give the script's own arguments first: --script {script} VALUE {shlex.join([argument])}"
            if argument in launch.arguments:  # VALUE would be passed on as well, and Hydra rejects it
                fix = f"add {shlex.join([argument])} to the launch in the script, because its $@ passes on VALUE too"
            raise ScriptError(f"{where}: the script uses its argument {argument} as the value of {key}. Fix: {fix}.")
        lost = [argument for argument in arguments if _is_lost(argument, launch, read.looked_at)]
        if words := [argument for argument in lost if not _LIKE_AN_OVERRIDE.fullmatch(argument)]:
            raise ScriptError(
                f"{where}: {words[0]} does not reach the launch. "
                f'Fix: end the launch with "$@", or add {words[0]} to it.'
            )
        if any(word.isspace() for word in launch.arguments):
            raise ScriptError(f"{where}: an argument consists only of blanks. Fix: remove the blank after a backslash.")
        launches[replace(launch, arguments=(*launch.arguments, *lost), lost=tuple(lost), assumed=assumed)] = None
    if len(launches) > MOST:
        raise ScriptError(
            f"{script}, line {found[0][0].line}: {len(launches)} different launches, but at most {MOST} are checked. "
            f"Fix: check the script with fewer values in its loops."
        )
    return list(launches)


def _read(script: Path, arguments: list[str], line: int | None) -> tuple[Script, list[str]]:
    """Read a script; unset variables that occur only in names and folders of its launches are empty, as in bash."""
    empty: dict[str, str] = {}
    while True:
        read = read_script(script, arguments, {**os.environ, **empty})
        unknown = [
            [w for w in each.words if isinstance(w, Unknown)] for each in read.calls if line in (None, each.line)
        ]
        words = [word for each in unknown if _count_overrides([word.prefix for word in each]) for word in each]
        free = {each.unset for each in words if _is_free(each)} - {each.unset for each in words if not _is_free(each)}
        if not free or _NOUNSET.search(read_text(script)):
            return read, sorted(empty)
        empty |= dict.fromkeys(free, "")


def _is_free(word: Unknown) -> bool:
    """Return True if the only unknown part of a name or folder is a variable that bash replaces with nothing."""
    return _FREE_TEXT.fullmatch(word.prefix) is not None and word.unset.isidentifier()


def _explain_no_launch(read: Script, line: int | None) -> str:
    if (end := read.end) is not None and end.name == "exit":
        status = f" ({end.name} {end.status})" if end.status else ""
        before = f"the launch of line {line}" if line is not None else "any launch"
        fixes = " and ".join(propose_exports(dict.fromkeys(read.unset, False)))
        given = f" Fix: {fixes}." if fixes else ""
        return f"the script ends at line {end.line}{status} before {before}.{given}"
    where = f"no launch at line {line}" if line is not None else "no launch"
    return f"{where}: no call of `python -m MODULE` or torchrun with Hydra overrides was found."


def _find_taken(arguments: list[str], launch: Launch) -> tuple[str, str] | None:
    """Find a script argument that is an override but becomes the value of a key in the launch; return both."""
    for argument in filter(_LIKE_AN_OVERRIDE.fullmatch, arguments):
        for word in launch.arguments:
            if word.endswith(f"={argument}") and (found := KEY.match(word)):
                return argument, found[1]
    return None


def _is_lost(argument: str, launch: Launch, looked_at: frozenset[Field]) -> bool:
    """Return True if an argument has no effect: no word of the launch uses the override, or the value is never read."""
    if argument in launch.arguments:
        return False
    if _LIKE_AN_OVERRIDE.fullmatch(argument):
        return not any(argument in word for word in launch.arguments)
    return argument not in looked_at


def _build_launch(called: ProgramCall, script: Path, arguments: list[str]) -> Launch | None:
    """Build the launch of a call; None if the call is not a launch.

    Raises:
        ScriptError: the call is a launch, but a word of it is unknown.
    """
    words = _replace_uv_run(list(called.words))
    start = next((i for i, word in enumerate(words) if isinstance(word, str) and _PYTHON.fullmatch(word)), None)
    if start is None:
        if isinstance(words[0], Unknown) and _count_overrides(words[1:]) > 1:
            why = describe_unknowns([words[0]], script)
            raise ScriptError(f"{script}, line {called.line}: the program that this line calls is unknown: {why}")
        return None
    by_torchrun = str(words[start]).endswith("torchrun")
    module, rest = (
        _find_below_torchrun(list(words[start + 1 :])) if by_torchrun else _find_module(list(words[start + 1 :]))
    )
    if module is None or not _count_overrides([*rest, *(w.prefix for w in rest if isinstance(w, Unknown))]):
        return None
    if by := next((word for word in words[:start] if isinstance(word, str) and _DISTRIBUTORS.fullmatch(word)), None):
        raise ScriptError(
            f"{script}, line {called.line}: {by} fills in the arguments of this launch, which is not supported. "
            f"Fix: check the launch itself, with its overrides."
        )
    rest = [_settle(word, [*rest[place + 1 :], *arguments]) for place, word in enumerate(rest)]
    if unknowns := [word for word in (module, *rest) if isinstance(word, Unknown)]:
        raise ScriptError(f"{script}, line {called.line}: {describe_overrides(unknowns, script)}")
    return Launch(str(module), tuple(map(str, rest)), f"{script}, line {called.line}")


def _replace_uv_run(words: list[Field]) -> list[Field]:
    """Return the Python call that ``uv run`` makes; return other calls unchanged."""
    uv = next((i for i, word in enumerate(words) if isinstance(word, str) and _UV.fullmatch(word)), None)
    if uv is None or "run" not in words[uv:]:
        return words
    words = words[words.index("run", uv) + 1 :]
    texts = [word if isinstance(word, str) else "" for word in words]
    before = texts[: next((i for i, text in enumerate(texts) if _OVERRIDE.fullmatch(text)), None)]
    # The last Python is used, because an interpreter given with --python precedes it.
    if pythons := [i for i, word in enumerate(before) if _PYTHON.fullmatch(word)]:
        return words[pythons[-1] :]
    begin = next((i for i, word in enumerate(before) if word in ("-m", "--module") or word.endswith(".py")), None)
    if begin is None:
        return words
    return ["python", "-m" if before[begin] == "--module" else words[begin], *words[begin + 1 :]]


def _find_module(words: list[Field]) -> tuple[Field | None, list[Field]]:
    """Find the module that Python runs, and its arguments."""
    while words:
        word = words.pop(0)
        if word == "-m" and words:
            return _find_below_torchrun(words[1:]) if words[0] in _TORCHRUN else (words[0], words[1:])
        if word in _FLAGS_WITH_VALUE:
            words = words[1:]
        elif isinstance(word, str) and word.endswith(".py"):
            return word.removesuffix(".py").removeprefix("./").replace("/", "."), words
        elif not (isinstance(word, str) and word.startswith("-")):
            break
    return None, []


def _find_below_torchrun(words: list[Field]) -> tuple[Field | None, list[Field]]:
    """Find the module that torchrun runs in each process, which follows torchrun's own flags and their values."""
    for place, word in enumerate(words):
        if word in ("-m", "--module"):
            return (words[place + 1], words[place + 2 :]) if words[place + 1 :] else (None, [])
        if isinstance(word, str) and not word.startswith("-") and word.endswith(".py"):
            return _find_module(words[place:])
    return None, []


def _settle(word: Field, later: list[Field]) -> Field:
    """Replace an unknown word with a later value of the same key, because Hydra uses the last of two overrides."""
    found = KEY.fullmatch(word.prefix) if isinstance(word, Unknown) else None
    if found is None or not isinstance(word, Unknown):
        return word
    for other in reversed(later):
        if isinstance(other, str) and (same := KEY.match(other)) and same[1] == found[1]:
            return word.prefix + other[same.end() :]
    return word


def _count_overrides(words: list[Field] | tuple[Field, ...]) -> int:
    """Count the words that look like overrides of nested keys."""
    return sum(isinstance(word, str) and _OVERRIDE.fullmatch(word) is not None for word in words)
