"""The launch in a script: which of its programs it is, and whether all of its words are known."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .bash.reader import Called
from .bash.script import read_script
from .bash.values import Field, ScriptError, Unknown
from .launch import Launch

_PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun)")
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_KEY = re.compile(r"[+]{0,2}([\w./@-]+)=", re.S)
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w/@-]*\.[\w./@-]*=.*|correction=.*", re.S)
_FLAGS_WITH_VALUE = ("-W", "-X")


def launch_of(script: Path, arguments: list[str], line: int | None = None) -> Launch:
    """The launch of a training program in a script.

    Args:
        arguments: of the script, which reach the launch where it hands them on; one that sets a key whose value only
            running the script would tell stands for that value.
        line: of the launch, for scripts with several.

    Raises:
        ScriptError: there is none, or more than one, or a word of it is not known without running the script; names
            the line and what to do.
    """
    found = [
        (called, launch)
        for called in read_script(script, arguments, dict(os.environ))
        if (launch := _launch(called, script, arguments)) is not None and line in (None, called.line)
    ]
    if not found:
        where = f"no launch at line {line}" if line is not None else "no launch"
        raise ScriptError(f"{script}: {where}: no call of `python -m MODULE` or torchrun with Hydra overrides was met.")
    if len({launch.origin for _, launch in found}) > 1:
        lines = ", ".join(f"{called.line} ({launch.module})" for called, launch in found)
        raise ScriptError(f"{script}: several launches, at the lines {lines}. Choose one: --line {found[0][0].line}.")
    called, launch = found[-1]
    if called.doubt is not None:
        raise ScriptError(
            f"{script}, line {called.line}: whether this is launched is not known: {_said(called.doubt)}."
        )
    if lost := [argument for argument in arguments if argument not in launch.arguments]:
        raise ScriptError(f'{script}, line {called.line}: {lost[0]} does not reach the launch. It ends in no "$@".')
    return launch


def _launch(called: Called, script: Path, arguments: list[str]) -> Launch | None:
    """The launch that a call is; None if it is none.

    Raises:
        ScriptError: it is one, and a word of it is not known.
    """
    words = called.words
    start = next((i for i, word in enumerate(words) if isinstance(word, str) and _PYTHON.fullmatch(word)), None)
    if start is None:
        unknown = next((word for word in words if isinstance(word, Unknown)), None)
        if isinstance(words[0], Unknown) and unknown is not None and _overrides(words[1:]) > 1:
            raise ScriptError(f"{script}, line {called.line}: which program this calls is not known: {_said(unknown)}.")
        return None
    by_torchrun = str(words[start]).endswith("torchrun")
    module, rest = _below_torchrun(list(words[start + 1 :])) if by_torchrun else _module(list(words[start + 1 :]))
    if module is None or not _overrides([*rest, *(w.prefix for w in rest if isinstance(w, Unknown))]):
        return None
    rest = [_settled(word, [*rest[place + 1 :], *arguments]) for place, word in enumerate(rest)]
    unknown = next((word for word in (module, *rest) if isinstance(word, Unknown)), None)
    if unknown is not None:
        key = _KEY.match(unknown.prefix)
        mend = (
            f" To look at the launch with a value of yours, add {key[1]}=VALUE behind --script {script}." if key else ""
        )
        raise ScriptError(f"{script}, line {called.line}: an override is not known: {_said(unknown)}.{mend}")
    return Launch(str(module), tuple(map(str, rest)), f"{script}, line {called.line}")


def _said(unknown: Unknown) -> str:
    mend = f" Fix: export {found[1]}, even empty" if (found := re.match(r"\$(\w+) is not set", unknown.why)) else ""
    return f"{unknown.why} (line {unknown.line}).{mend}"


def _module(words: list[Field]) -> tuple[Field | None, list[Field]]:
    """What Python runs, as a module, and its arguments."""
    while words:
        word = words.pop(0)
        if word == "-m" and words:
            return _below_torchrun(words[1:]) if words[0] in _TORCHRUN else (words[0], words[1:])
        if word in _FLAGS_WITH_VALUE:
            words = words[1:]
        elif isinstance(word, str) and word.endswith(".py"):
            return word.removesuffix(".py").removeprefix("./").replace("/", "."), words
        elif not (isinstance(word, str) and word.startswith("-")):
            break
    return None, []


def _below_torchrun(words: list[Field]) -> tuple[Field | None, list[Field]]:
    """What torchrun runs in each process: what follows its own flags, which may have values of their own."""
    for place, word in enumerate(words):
        if word in ("-m", "--module"):
            return (words[place + 1], words[place + 2 :]) if words[place + 1 :] else (None, [])
        if isinstance(word, str) and not word.startswith("-") and word.endswith(".py"):
            return _module(words[place:])
    return None, []


def _settled(word: Field, later: list[Field]) -> Field:
    """A word that is not known, with the value that a later word gives its key: of two, Hydra takes the last."""
    found = _KEY.fullmatch(word.prefix) if isinstance(word, Unknown) else None
    if found is None or not isinstance(word, Unknown):
        return word
    for other in reversed(later):
        if isinstance(other, str) and (same := _KEY.match(other)) and same[1] == found[1]:
            return word.prefix + other[same.end() :]
    return word


def _overrides(words: list[Field] | tuple[Field, ...]) -> int:
    """How many words look like overrides of nested keys."""
    return sum(isinstance(word, str) and _OVERRIDE.fullmatch(word) is not None for word in words)
