"""Word expansion: quotes, parameters, substitutions and field splitting."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .arithmetic import evaluate
from .braces import expand_braces
from .budget import FIELD
from .lexer import Lexer
from .parameters import Parameter, expand_parameter, parse_parameter
from .shell_values import Field, ShellState, Unknown

Substitute = Callable[[str, int], Field]
"""Called with the commands of $(...) and their line; returns their output."""
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ANSI = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_ASSIGNS = re.compile(
    r"\s*(?:(\+\+|--)\s*(?P<first>[A-Za-z_]\w*)|(?P<name>[A-Za-z_]\w*)\s*"
    r"(?:(?P<after>\+\+|--)|(?P<with><<|>>|[-+*/%&|^])?=(?!=)(?P<value>.+)))\s*",
    re.S,
)


@dataclass(frozen=True)
class _Piece:
    """A part of a word; ``split``: blanks in the part end a field; ``ends``: a field ends after the part."""

    value: Field
    split: bool = False
    ends: bool = False
    quoted: bool = False


class WordExpander:
    """An expander of words in a shell state; ``unset_is_empty`` is set in tests, where bash uses an empty value."""

    def __init__(self, state: ShellState, substitute: Substitute, *, unset_is_empty: bool = False) -> None:
        self._state = state
        self._unset_is_empty = unset_is_empty
        self._substitute = substitute

    def expand_fields(self, written: str, line: int) -> list[Field]:
        """Expand a word of a command to its fields: none, one or several."""
        fields: list[Field] = []
        for word in expand_braces(written, lambda text, place: Lexer(text, line).find_piece_end(place)):
            self._state.budget.spend_bytes(FIELD)
            fields += _join_fields(self._split_pieces(word, line, quoted=False))
        return fields

    def expand_text(self, written: str, line: int) -> Field:
        """Expand a word to one value without splitting, as in assignments, tests and here-strings."""
        return concatenate(piece.value for piece in self._split_pieces(written, line, quoted=False))

    def expand_document(self, written: str, line: int) -> Field:
        """Expand a here-document whose name is not quoted."""
        return concatenate(piece.value for piece in self._split_pieces(written, line, quoted=True, document=True))

    def expand_pattern(self, written: str, line: int) -> Field:
        """Expand a pattern; quoted parts are matched literally."""
        pieces = self._split_pieces(written, line, quoted=False)
        return concatenate(
            re.sub(r"[*?\[]", r"[\g<0>]", piece.value) if piece.quoted and isinstance(piece.value, str) else piece.value
            for piece in pieces
        )

    def evaluate_arithmetic(self, expression: str, line: int) -> Field:
        """Evaluate an arithmetic expression, or execute an assignment such as ``i++`` or ``n = 2 * m``."""
        plain = self.expand_document(expression, line)
        if isinstance(plain, Unknown):
            return plain
        if found := _ASSIGNS.fullmatch(plain):
            name = found["name"] or found["first"]
            by = f"{found['with'] or ''}({found['value']})" if found["value"] else f"{(found[1] or found['after'])[0]}1"
            before = self.evaluate_arithmetic(name, line)
            after = self.evaluate_arithmetic(by if found["value"] and not found["with"] else f"{name}{by}", line)
            self._state.variables[name] = after
            return before if found["after"] else after
        names = set(re.findall(r"[A-Za-z_]\w*", plain))
        numbers = {}
        for name in names:
            value = self._state.variables.get(name, "")
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, Unknown):
                return value
            numbers[name] = str(value) if isinstance(value, str) else ""
        try:
            return str(evaluate(plain, numbers))
        except ValueError as error:
            return Unknown(f"$(({expression.strip()})) is not supported ({error})", line)

    def _split_pieces(self, written: str, line: int, *, quoted: bool, document: bool = False) -> Iterator[_Piece]:
        for piece in self._read_pieces(written, line, quoted, document):
            self._state.budget.spend_bytes(FIELD + len(_get_text(piece.value)))
            yield piece

    def _read_pieces(self, written: str, line: int, quoted: bool, document: bool) -> Iterator[_Piece]:
        place = 0
        if not quoted and re.match(r"~(?=/|$)", written):
            yield _Piece(self._expand_home(line))
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
                self._substitute(written[place + 2 : end - 1], line)
                yield _Piece(Unknown(f"{character}(...) is not supported", line))
                place = end
            else:
                ends = "\\'\"`$" if quoted else "\\'\"`$<>"
                end = next((i for i in range(place + 1, len(written)) if written[i] in ends), len(written))
                yield _Piece(written[place:end])
                place = end

    def _expand_dollar(self, rest: str, line: int, quoted: bool) -> tuple[int, list[_Piece]]:
        """Return the length of the text of a $..., and its expansion."""
        if rest.startswith("$'") and not quoted:
            end = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.S).match(rest)
            assert end is not None, "the lexer checks that it is closed"
            inside = re.sub(r"\\(.)", lambda found: _ANSI.get(found[1], found[0]), rest[2 : end.end() - 1])
            return end.end(), [_Piece(inside)]
        if rest.startswith(("$(", "${")):
            end_at = Lexer(rest, line).find_piece_end(0)
            inside = rest[2 : end_at - 1]
            if inside.startswith("(") and inside.endswith(")") and rest[1] == "(":
                return end_at, [_Piece(self.evaluate_arithmetic(inside[1:-1], line))]
            if rest[1] == "(":
                return end_at, [_Piece(self._substitute(inside, line), split=not quoted)]
            return end_at, self._expand_parameter(parse_parameter(inside, line), line, quoted)
        if found := _NAME.match(rest, 1):
            return found.end(), self._expand_parameter(Parameter(found[0]), line, quoted)
        return 1, [_Piece("$")]

    def _expand_parameter(self, asked: Parameter, line: int, quoted: bool) -> list[_Piece]:
        values = expand_parameter(asked, self._state, line, lambda text: self.expand_text(text, line))
        if self._unset_is_empty:
            values = ["" if isinstance(value, Unknown) and value.may_be_empty else value for value in values]
        if not asked.is_list:
            return [_Piece(values[0] if values else "", split=not quoted)]
        if asked.is_joined and quoted:
            return [_Piece(concatenate(_intersperse_blanks(values)))]
        pieces = [_Piece(value, split=not quoted, ends=index < len(values) - 1) for index, value in enumerate(values)]
        # "${EMPTY[@]}" is not a field.
        return pieces or [_Piece("", split=True)]

    def _expand_home(self, line: int) -> Field:
        home = self._state.variables.get("HOME")
        return home if isinstance(home, str) else Unknown("$HOME is not set", line, unset="HOME")


def _get_text(value: Field) -> str:
    return value.prefix if isinstance(value, Unknown) else value


def concatenate(values: Iterator[Field]) -> Field:
    """Concatenate the parts of one value; Unknown if one of them is."""
    texts = []
    for value in values:
        if isinstance(value, Unknown):
            return value
        texts.append(value)
    return "".join(texts)


def _intersperse_blanks(values: list[Field]) -> Iterator[Field]:
    for index, value in enumerate(values):
        if index:
            yield " "
        yield value


def _join_fields(pieces: Iterator[_Piece]) -> Iterator[Field]:
    """Join pieces to fields, split at the blanks of pieces with ``split``."""
    current: Field | None = None

    def add(value: Field) -> Field:
        if current is None or isinstance(current, Unknown):
            return value if current is None else current
        return replace(value, prefix=current + value.prefix) if isinstance(value, Unknown) else current + value

    for piece in pieces:
        if not piece.split or isinstance(piece.value, Unknown):
            current = add(piece.value)
        else:
            parts = re.split(r"[ \t\n]+", piece.value)
            for index, part in enumerate(parts):
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
