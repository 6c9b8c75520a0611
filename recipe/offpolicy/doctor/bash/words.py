"""Word expansion: quotes, parameters, arithmetic, substitutions and field splitting."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from .conditions import evaluate
from .lexer import Lexer
from .shell_values import LARGEST, PATTERN, Field, OverBudget, ShellState, Unknown, find_unknown

_FORM = re.compile(
    r"(?P<length>#(?!\}|$))?(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?"
    r"(?P<operator>:?[-=+?]|%%?|\#\#?|//?|\^\^|,,|:)?(?P<word>.*)",
    re.S,
)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_CHANGING = {"RANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "SRANDOM", "PPID", "BASHPID"}
"""Variables that bash sets, whose values are known only when the script runs."""
_PIECE = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|\$\{[^{}]*\}", re.S)
"""A quoted piece or a parameter, whose braces bash does not expand."""
_BRACES = re.compile(r"(?<!\$)\{[^{}]*(,|\.\.)[^{}]*\}")
_ASSIGNS = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)|<<=|>>=")

Substitute = Callable[[str, int], Field]
"""Called with the commands of $(...) and their line; returns their output."""


@dataclass(frozen=True)
class _Parameter:
    """A parameter, and the operation applied to it.

    Attributes:
        index: index of an array element; @ or * for all elements.
        operator, word: as written, e.g. ``:-`` and the default.
        length: ``${#name}``.
    """

    name: str
    index: str | None = None
    operator: str = ""
    word: str = ""
    length: bool = False

    @property
    def is_list(self) -> bool:
        """True for a list of values: $@, $*, ${A[@]}."""
        return self.name in ("@", "*") or self.index in ("@", "*")


@dataclass(frozen=True)
class _Piece:
    """A part of a word; ``split``: blanks in the part end a field; ``ends``: a field ends after the part."""

    value: Field
    split: bool = False
    ends: bool = False
    quoted: bool = False


class WordExpander:
    """Expands words in a shell state; ``unset_is_empty`` is set in tests, where bash treats unset names as empty."""

    def __init__(self, state: ShellState, substitute: Substitute, *, unset_is_empty: bool = False) -> None:
        self._state = state
        self._unset_is_empty = unset_is_empty
        self._substitute = substitute

    def expand_fields(self, written: str, line: int) -> list[Field]:
        """Expand a word of a command to its fields: none, one or several."""
        if _BRACES.search(_PIECE.sub("", written)):
            why = f"bash expands the braces of {written}, which is not supported: quote a value, write out a list"
            return [Unknown(why, line, prefix=written.partition("{")[0])]
        return list(_join_fields(self._split_pieces(written, line, quoted=False)))

    def expand_text(self, written: str, line: int) -> Field:
        """Expand a word to one value without splitting, as in assignments, tests and here-strings."""
        return concatenate(piece.value for piece in self._split_pieces(written, line, quoted=False))

    def expand_document(self, written: str, line: int) -> Field:
        """Expand a here-document whose name is not quoted."""
        return concatenate(piece.value for piece in self._split_pieces(written, line, quoted=True, document=True))

    def expand_pattern(self, written: str, line: int) -> Field:
        """Expand a pattern; quoted parts are matched literally."""
        return concatenate(
            re.sub(r"[*?\[]", r"[\g<0>]", piece.value) if piece.quoted and isinstance(piece.value, str) else piece.value
            for piece in self._split_pieces(written, line, quoted=False)
        )

    def evaluate_arithmetic(self, expression: str, line: int) -> Field:
        """Evaluate an arithmetic expression; after one that assigns, such as ``i++``, its variables are unknown."""
        plain = self.expand_document(expression, line)
        if isinstance(plain, Unknown):
            return plain
        names = set(re.findall(r"[A-Za-z_]\w*", plain))
        why = Unknown(f"(({expression.strip()})) is not supported", line)
        if _ASSIGNS.search(plain):
            self._state.variables |= dict.fromkeys(names, why)
            return why
        values = {name: self._state.variables.get(name, "") for name in names}
        values = {name: value[0] if isinstance(value, list) and value else value for name, value in values.items()}
        try:
            return find_unknown(values.values()) or str(evaluate(plain, values))
        except ValueError as error:
            return replace(why, why=f"{why.why} ({error})")

    def _split_pieces(self, written: str, line: int, *, quoted: bool, document: bool = False) -> Iterator[_Piece]:
        place = 0
        if not quoted and re.match(r"~(?=/|$)", written):
            home = self._state.variables.get("HOME")
            yield _Piece(home if isinstance(home, str) else Unknown("$HOME is not set", line, unset="HOME"))
            place = 1
        while place < len(written):
            character = written[place]
            if character == "\\":
                following = written[place + 1 : place + 2]
                place += 2
                if following == "\n":
                    continue
                kept = quoted and following not in ('$`"\\' if not document else "$`\\")
                yield _Piece(f"\\{following}" if kept else following, quoted=True)
            elif character == "'" and not quoted:
                end = written.index("'", place + 1)
                yield _Piece(written[place + 1 : end], quoted=True)
                place = end + 1
            elif character == '"' and not document:
                end = Lexer(written, line).find_piece_end(place)
                inside = list(self._split_pieces(written[place + 1 : end - 1], line, quoted=True))
                yield from (replace(piece, quoted=True) for piece in inside or [_Piece("")])
                place = end
            elif character == "`":
                end = written.index("`", place + 1)
                yield _Piece(self._substitute(written[place + 1 : end], line), split=not quoted)
                place = end + 1
            elif character == "$":
                length, pieces = self._expand_dollar(written[place:], line, quoted)
                yield from pieces
                place += length
            elif not quoted and written.startswith(("<(", ">("), place):
                end = Lexer(written, line).find_piece_end(place)
                yield _Piece(Unknown(f"{character}(...) is not supported", line))
                place = end
            else:
                ends = "\\'\"`$" if quoted else "\\'\"`$<>"
                end = next((i for i in range(place + 1, len(written)) if written[i] in ends), len(written))
                yield _Piece(written[place:end])
                place = end

    def _expand_dollar(self, rest: str, line: int, quoted: bool) -> tuple[int, list[_Piece]]:
        """Return the length of an expansion that starts with $, and the result of the expansion."""
        if rest.startswith("$'") and not quoted:
            return Lexer(rest, line).find_piece_end(0), [_Piece(Unknown("$'...' is not supported", line))]
        if rest.startswith(("$(", "${")):
            end = Lexer(rest, line).find_piece_end(0)
            inside = rest[2 : end - 1]
            if rest[1] == "{":
                asked = _parse_parameter(inside)
                unknown = [_Piece(Unknown(f"${{{inside}}} is not supported", line))]
                return end, unknown if asked is None else self._expand_parameter(asked, line, quoted)
            if inside.startswith("(") and inside.endswith(")"):
                return end, [_Piece(self.evaluate_arithmetic(inside[1:-1], line))]
            return end, [_Piece(self._substitute(inside, line), split=not quoted)]
        if found := _NAME.match(rest, 1):
            return found.end(), self._expand_parameter(_Parameter(found[0]), line, quoted)
        return 1, [_Piece("$")]

    def _expand_parameter(self, asked: _Parameter, line: int, quoted: bool) -> list[_Piece]:
        values = self._apply_operator(asked, self._read_values(asked, line), line)
        if self._unset_is_empty:
            values = ["" if isinstance(value, Unknown) and value.may_be_empty else value for value in values]
        if not asked.is_list or asked.length:
            return [_Piece(values[0] if values else "", split=not quoted)]
        if quoted and "*" in (asked.name, asked.index):
            return [_Piece(find_unknown(values) or " ".join(map(str, values)))]
        pieces = [_Piece(value, split=not quoted, ends=index < len(values) - 1) for index, value in enumerate(values)]
        # "${EMPTY[@]}" produces no field.
        return pieces or [_Piece("", split=True)]

    def _read_values(self, asked: _Parameter, line: int) -> list[Field] | None:
        """Return the values of a parameter before its operation; None if it is unset."""
        name, state = asked.name, self._state
        if name in ("@", "*"):
            state.looked_at.update(state.arguments)
            return list(state.arguments)
        if name == "#":
            self._note_unset("1")
            return [str(len(state.arguments))]
        if name == "0" or (name == "BASH_SOURCE" and asked.index in (None, "0", "-1", "@")):
            return [str(state.script)]
        if name.isdigit():
            argument = state.arguments[int(name) - 1 : int(name)]
            state.looked_at.update(argument)
            return argument or None
        if not name.isidentifier():
            return [Unknown("$? is the status of a program" if name == "?" else f"${name} is set only in a run", line)]
        state.read.add(name)
        value = state.variables.get(name)
        if value is None:
            return [Unknown(f"${name} differs in each run", line)] if name in _CHANGING else None
        if not isinstance(value, list):
            return [value] if asked.index in (None, "0", "@", "*") else None
        if asked.index in ("@", "*"):
            return value
        index = self.expand_text(asked.index, line) if asked.index else "0"
        if isinstance(index, Unknown):
            return [index]
        try:
            return [value[int(index)]]
        except ValueError:
            return [Unknown(f"${{{name}[{index}]}} belongs to an associative array", line)]
        except IndexError:
            return None

    def _apply_operator(self, asked: _Parameter, values: list[Field] | None, line: int) -> list[Field]:
        """Return the values after the operation: several for a list, otherwise one."""
        if asked.length:
            value = values[0] if values else ""
            return [
                str(len(values or ())) if asked.is_list else value if isinstance(value, Unknown) else str(len(value))
            ]
        if asked.operator and asked.operator[-1] in "-=+?":
            return self._apply_default(asked, values, line)
        if values is None:
            self._note_unset(asked.name)
            return [] if asked.is_list else [Unknown(f"${asked.name} is not set", line, unset=asked.name)]
        if asked.operator == ":":
            return self._slice(asked, values, line)
        return [
            value if isinstance(value, Unknown) or not asked.operator else self._transform(asked, value, line)
            for value in values
        ]

    def _apply_default(self, asked: _Parameter, values: list[Field] | None, line: int) -> list[Field]:
        empty_counts, kind = asked.operator.startswith(":"), asked.operator[-1]
        if values and isinstance(values[0], Unknown) and empty_counts and not asked.is_list:
            return values
        there = values is not None and (not empty_counts or any(value != "" for value in values))
        if kind == "+":
            return [self.expand_text(asked.word, line)] if there else ([] if asked.is_list else [""])
        if values is not None and there:
            return values
        if kind == "?":
            self._note_unset(asked.name)
            why = f"${asked.name} is not set, and the script exits if it is missing"
            return [Unknown(why, line, unset=asked.name, required=True)]
        if (value := self.expand_text(asked.word, line)) == "":
            self._note_unset(asked.name)
        if isinstance(value, Unknown) and asked.name.isidentifier():
            value = replace(value, variable=asked.name)
        if kind == "=" and asked.name.isidentifier():
            self._state.variables[asked.name] = value
        return [value]

    def _note_unset(self, name: str) -> None:
        self._state.unset.append("1" if name.isdigit() else name)

    def _slice(self, asked: _Parameter, values: list[Field], line: int) -> list[Field]:
        bounds = self.expand_text(asked.word, line)
        if isinstance(bounds, Unknown):
            return [bounds]
        try:
            start, *length = (int(part) for part in bounds.split(":"))
        except ValueError:
            return [Unknown(f"${{{asked.name}:{asked.word}}} is not supported", line)]

        def cut(size: int) -> slice:
            first = start if start >= 0 else max(size + start, 0)
            return slice(first, size if not length else first + length[0] if length[0] >= 0 else size + length[0])

        if asked.is_list:
            # The first element of $@ is $1.
            shifted = values if asked.index else ["", *values]
            return shifted[cut(len(shifted))]
        value = values[0]
        return [value if isinstance(value, Unknown) else value[cut(len(value))]]

    def _transform(self, asked: _Parameter, value: str, line: int) -> Field:
        operator = asked.operator
        if operator in ("^^", ",,"):
            return value.upper() if operator == "^^" else value.lower()
        pattern, _, replacement = asked.word.partition("/") if operator in ("/", "//") else (asked.word, "", "")
        what, by = self.expand_text(pattern, line), self.expand_text(replacement, line)
        if isinstance(what, Unknown) or isinstance(by, Unknown):
            return what if isinstance(what, Unknown) else by
        if max(len(value), len(what), len(by)) > PATTERN:
            return Unknown(f"${asked.name} is too long for a pattern", line)
        if operator in ("/", "//"):
            found = re.compile(fnmatch.translate(what).removesuffix(r"\Z").removesuffix(r"\z"))
            return found.sub(lambda _: by, value, count=1 if operator == "/" else 0)
        ends = range(len(value) + 1)  # # and % remove the shortest match, ## and %% the longest
        if operator.startswith("#"):
            order = ends if operator == "#" else reversed(ends)
            return next((value[end:] for end in order if fnmatch.fnmatchcase(value[:end], what)), value)
        order = reversed(ends) if operator == "%" else ends
        return next((value[:end] for end in order if fnmatch.fnmatchcase(value[end:], what)), value)


def _parse_parameter(written: str) -> _Parameter | None:
    """Parse the text between ${ and }; None if its syntax is not supported."""
    found = _FORM.fullmatch(written)
    if found is None or (found["word"] and not found["operator"]):
        return None
    return _Parameter(found["name"], found["index"], found["operator"] or "", found["word"], bool(found["length"]))


def concatenate(values: Iterable[Field]) -> Field:
    """Concatenate the parts of one value; Unknown if one of them is Unknown."""
    parts = list(values)
    if (unknown := find_unknown(parts)) is not None:
        return unknown
    if sum(len(str(part)) for part in parts) > LARGEST:
        raise OverBudget(f"a value is longer than {LARGEST} characters.")
    return "".join(map(str, parts))


def _join_fields(pieces: Iterator[_Piece]) -> Iterator[Field]:
    """Join pieces into fields, splitting at the blanks of pieces with ``split``."""
    current: Field | None = None

    def add(value: Field) -> Field:
        if current is None or isinstance(current, Unknown):
            return value if current is None else current
        if isinstance(value, Unknown):
            return replace(value, prefix=current + value.prefix)
        return concatenate((current, value))

    for piece in pieces:
        if not piece.split or isinstance(piece.value, Unknown):
            current = add(piece.value)
        else:
            for index, part in enumerate(re.split(r"[ \t\n]+", piece.value)):
                if index and current is not None:
                    yield current
                    current = None
                if part:
                    current = add(part)
        if piece.ends and current is not None:
            yield current
            current = None
    if current is not None:
        yield current
