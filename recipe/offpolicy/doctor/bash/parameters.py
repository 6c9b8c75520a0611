"""Parameter expansion, ``${...}``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from .shell_values import PATTERN, Field, ScriptError, ShellState, Unknown, Value

_FORM = re.compile(
    r"(?P<length>#(?!\}|$))?(?P<indirect>!(?=\w))?(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?"
    r"(?P<operator>:?[-=+?]|%%?|\#\#?|//?|\^\^?|,,?|:)?(?P<word>.*)",
    re.S,
)
_CHANGING = {"RANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "SRANDOM", "PPID", "BASHPID"}
"""Variables that bash sets, whose values are known only when the script runs."""
_WITHOUT_VALUE = {"-", ":-", "=", ":=", "+", ":+", "?", ":?"}


@dataclass(frozen=True)
class Parameter:
    """A parameter, and the operation applied to it.

    Attributes:
        index: index of an array element; @ or * for all elements.
        operator, word: as written, e.g. ``:-`` and the default.
        length: ``${#name}``.
        indirect: True for ``${!name}``, the parameter whose name is the value of ``name``, and for ``${!name[@]}``, the
            indices.
    """

    name: str
    index: str | None = None
    operator: str = ""
    word: str = ""
    length: bool = False
    indirect: bool = False

    @property
    def is_list(self) -> bool:
        """True for a list of values: $@, $*, ${A[@]}."""
        return (self.name in ("@", "*") or self.index in ("@", "*")) and not self.length

    @property
    def is_joined(self) -> bool:
        """True if the list becomes one value inside quotes."""
        return self.name == "*" or self.index == "*"


def parse_parameter(written: str, line: int) -> Parameter:
    """Parse the text between ${ and }.

    Raises:
        ScriptError: unsupported syntax.
    """
    if written == "#":
        return Parameter("#")
    found = _FORM.fullmatch(written)
    if found is None or (found["word"] and not found["operator"]):
        raise ScriptError(f"line {line}: ${{{written}}} is not supported")
    return Parameter(
        found["name"],
        found["index"],
        found["operator"] or "",
        found["word"],
        bool(found["length"]),
        bool(found["indirect"]),
    )


def expand_parameter(asked: Parameter, state: ShellState, line: int, expand: Callable[[str], Field]) -> list[Field]:
    """Expand a list to its values, and any other parameter to one value, or to none if it is unset."""
    if asked.indirect:
        return _expand_indirect(asked, state, line, expand)
    values = _read_values(asked, state, line, expand)
    if asked.length:
        return _compute_length(asked, values)
    if asked.operator in _WITHOUT_VALUE:
        return _apply_default(asked, values, state, line, expand)
    if values is None:
        return [] if asked.is_list else [Unknown(f"${asked.name} is not set", line, unset=asked.name)]
    if not asked.operator:
        return values
    if asked.operator == ":":
        return _slice(asked, values, line, expand)
    word = expand(asked.word) if asked.operator[0] not in "/^," else ""
    return [value if isinstance(value, Unknown) else _transform(asked, value, word, line, expand) for value in values]


def _expand_indirect(asked: Parameter, state: ShellState, line: int, expand: Callable[[str], Field]) -> list[Field]:
    """Expand ``${!name}`` with its operation, and ``${!name[@]}``."""
    named = state.variables.get(asked.name)
    if asked.is_list:
        return [named] if isinstance(named, Unknown) else [str(i) for i in range(len(named or ()))]
    name = (_read_values(replace(asked, index=None, indirect=False), state, line, expand) or [""])[0]
    if isinstance(name, Unknown):
        return [name]
    found = _FORM.fullmatch(name)
    if found is None or found["operator"] or found["word"]:
        return [Unknown(f"${{!{asked.name}}} names no variable", line)]
    return expand_parameter(
        replace(asked, name=found["name"], index=found["index"], indirect=False), state, line, expand
    )


def _read_values(asked: Parameter, state: ShellState, line: int, expand: Callable[[str], Field]) -> list[Field] | None:
    """Return the values of a parameter before its operation; None if it is unset."""
    name = asked.name
    if name in ("@", "*"):
        state.looked_at.update(state.arguments)
        return list(state.arguments)
    if name == "#":
        return [str(len(state.arguments))]
    if name == "0" or (name == "BASH_SOURCE" and asked.index in (None, "0", "-1", "@")):
        return [str(state.script)]
    if name.isdigit():
        argument = state.arguments[int(name) - 1 : int(name)]
        state.looked_at.update(argument)
        return argument or None
    if name == "?":
        return [Unknown("$? is the status of a program that is not run", line)]
    if not name.isidentifier():
        return [Unknown(f"${name} exists only in a running shell", line)]
    value: Value | None = state.variables.get(name)
    if value is None:
        return [Unknown(f"${name} differs in each run", line)] if name in _CHANGING else None
    if not isinstance(value, list):
        return [value] if asked.index in (None, "0", "@", "*") else None
    if asked.index in ("@", "*"):
        return value
    index = expand(asked.index) if asked.index else "0"
    if isinstance(index, Unknown):
        return [index]
    try:
        return [value[int(index)]]
    except ValueError:
        return [Unknown(f"${{{name}[{index}]}} belongs to an associative array", line)]
    except IndexError:
        return None


def _compute_length(asked: Parameter, values: list[Field] | None) -> list[Field]:
    if asked.index in ("@", "*") or asked.name in ("@", "*"):
        return [str(len(values or []))]
    value = values[0] if values else ""
    return [value if isinstance(value, Unknown) else str(len(value))]


def _apply_default(
    asked: Parameter, values: list[Field] | None, state: ShellState, line: int, expand: Callable[[str], Field]
) -> list[Field]:
    empty_counts = asked.operator.startswith(":")
    if values and isinstance(values[0], Unknown) and empty_counts and not asked.is_list:
        return values
    there = values is not None and (not empty_counts or any(value != "" for value in values))
    match asked.operator[-1]:
        case "+":
            return [expand(asked.word)] if there else ([] if asked.is_list else [""])
        case _ if there:
            assert values is not None
            return values
        case "?":
            return [
                Unknown(
                    f"${asked.name} is not set, and the script ends without it", line, unset=asked.name, required=True
                )
            ]
    value = expand(asked.word)
    if isinstance(value, Unknown) and asked.name.isidentifier():
        value = replace(value, variable=asked.name)
    if asked.operator[-1] == "=" and asked.name.isidentifier():
        state.variables[asked.name] = value
    return [value]


def _slice(asked: Parameter, values: list[Field], line: int, expand: Callable[[str], Field]) -> list[Field]:
    bounds = expand(asked.word)
    if isinstance(bounds, Unknown):
        return [bounds]
    try:
        start, *length = (int(part) for part in bounds.split(":"))
    except ValueError:
        return [Unknown(f"${{{asked.name}:{asked.word}}} is not supported", line)]

    def cut(sequence: str | list[Field]) -> slice:
        first = start if start >= 0 else max(len(sequence) + start, 0)
        end = len(sequence) if not length else first + length[0] if length[0] >= 0 else len(sequence) + length[0]
        return slice(first, end)

    if asked.is_list:
        # The first element of $@ is $1.
        shifted = values if asked.index else ["", *values]
        return shifted[cut(shifted)]
    value = values[0]
    return [value if isinstance(value, Unknown) else value[cut(value)]]


def _transform(asked: Parameter, value: str, word: Field, line: int, expand: Callable[[str], Field]) -> Field:
    if isinstance(word, Unknown):
        return word
    if max(len(value), len(word)) > PATTERN:
        return Unknown(f"${asked.name} is too long for a pattern", line)
    match asked.operator:
        case "#" | "##" | "%" | "%%":
            return _trim(value, word, asked.operator)
        case "/" | "//":
            pattern, _, replacement = asked.word.partition("/")
            what, by = expand(pattern), expand(replacement)
            if isinstance(what, Unknown) or isinstance(by, Unknown):
                return what if isinstance(what, Unknown) else by
            if max(len(what), len(by)) > PATTERN:
                return Unknown(f"${{{asked.name}{asked.operator}...}} is too long", line)
            found = re.compile(fnmatch.translate(what).removesuffix(r"\Z").removesuffix(r"\z"))
            return found.sub(lambda _: by, value, count=1 if asked.operator == "/" else 0)
        case "^^":
            return value.upper()
        case ",,":
            return value.lower()
    return Unknown(f"${{{asked.name}{asked.operator}{asked.word}}} is not supported", line)


def _trim(value: str, pattern: str, operator: str) -> str:
    """Remove the shortest prefix (#) or suffix (%) that matches the pattern; ## and %% remove the longest."""
    ends = range(len(value) + 1)
    if operator.startswith("#"):
        order = ends if operator == "#" else reversed(ends)
        return next((value[end:] for end in order if fnmatch.fnmatchcase(value[:end], pattern)), value)
    order = reversed(ends) if operator == "%" else ends
    return next((value[:end] for end in order if fnmatch.fnmatchcase(value[end:], pattern)), value)
