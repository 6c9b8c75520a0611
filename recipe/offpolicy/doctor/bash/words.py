"""Word expansion: quotes, braces, parameters, arithmetic, substitutions and field splitting."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from .lexer import Lexer
from .parameters import Parameter, expand_parameter, parse_parameter
from .shell_values import FIELD, PATTERN, Field, ShellState, Unknown

Skip = Callable[[str, int], int]
"""Called with a word and a position; returns the position after the character or the quoted or bracketed piece that
starts there."""
_SEQUENCE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.(-?\d+))?")


def expand_braces(word: str, skip: Skip) -> Iterator[str]:
    """Expand the braces of an unexpanded word, lazily; quoted braces are unchanged."""
    place = 0
    while place < len(word):
        if word[place] == "{" and (found := _read_brace(word, place, skip)) is not None:
            end, parts = found
            for part in parts:
                for rest in expand_braces(word[end:], skip):
                    yield word[:place] + part + rest
            return
        place = skip(word, place)
    yield word


def _read_brace(word: str, start: int, skip: Skip) -> tuple[int, Iterable[str]] | None:
    """Return the position after a brace and its expansion; None for a brace that bash leaves unchanged."""
    depth, place, cuts = 0, start, [start]
    while place < len(word):
        character = word[place]
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 1:
            cuts.append(place)
        if depth == 0:
            break
        place = skip(word, place)
    else:
        return None
    if len(cuts) == 1:
        sequence = _SEQUENCE.fullmatch(word, start + 1, place)
        return None if sequence is None else (place + 1, _count(sequence))
    parts = [word[cut + 1 : end] for cut, end in zip(cuts, [*cuts[1:], place], strict=True)]
    return place + 1, (each for part in parts for each in expand_braces(part, skip))


def _count(sequence: re.Match[str]) -> Iterable[str]:
    first, last, one, other, step = sequence.groups()
    ends = (int(first), int(last)) if first else (ord(one), ord(other))
    by = abs(int(step or 1)) or 1
    numbers = range(ends[0], ends[1] + 1, by) if ends[0] <= ends[1] else range(ends[0], ends[1] - 1, -by)
    if not first:
        return map(chr, numbers)
    width = max(len(first), len(last)) if re.search(r"^-?0\d", first) or re.search(r"^-?0\d", last) else 0
    return (f"{number:0{width}d}" for number in numbers)


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Div: lambda a, b: _divide(a, b),
    ast.Mod: lambda a, b: a - b * _divide(a, b),
}
_COMPARED: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LARGEST_EXPONENT = 62


def evaluate(expression: str, numbers: Mapping[str, str]) -> int:
    """Evaluate an expression without assignments, in 64 bits like bash.

    Args:
        numbers: values of the expression's variables; missing and empty variables count as 0.

    Raises:
        ValueError: the expression is not integer arithmetic.
    """
    # Inside $((...)) a variable needs no $; && || ! become Python's operators, so that Python's parser can be used.
    text = re.sub(r"!(?!=)", " not ", expression.replace("&&", " and ").replace("||", " or ").replace("$", ""))
    if len(text) > PATTERN:
        raise ValueError(f"{len(text)} characters")
    try:
        tree = ast.parse(text.strip() or "0", mode="eval")
        return _wrap(_evaluate_node(tree.body, numbers))
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _evaluate_node(node: ast.expr, numbers: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name():
            return _parse_number(numbers.get(node.id, ""))
        case ast.BinOp():
            left, right = _evaluate_node(node.left, numbers), _evaluate_node(node.right, numbers)
            if isinstance(node.op, ast.Pow | ast.LShift) and not 0 <= right <= _LARGEST_EXPONENT:
                raise ValueError(f"the exponent {right}")
            if type(node.op) in _BINARY:
                return _wrap(_BINARY[type(node.op)](left, right))
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate_node(node.operand, numbers)
        case ast.UnaryOp(op=ast.UAdd()):
            return _evaluate_node(node.operand, numbers)
        case ast.UnaryOp(op=ast.Not()):
            return int(not _evaluate_node(node.operand, numbers))
        case ast.BoolOp():
            holds = [bool(_evaluate_node(each, numbers)) for each in node.values]
            return int(all(holds) if isinstance(node.op, ast.And) else any(holds))
        case ast.Compare(ops=[compared]):
            return int(
                _COMPARED[type(compared)](
                    _evaluate_node(node.left, numbers), _evaluate_node(node.comparators[0], numbers)
                )
            )
    raise ValueError(ast.unparse(node))


def _wrap(number: int) -> int:
    """Wrap a number to 64 bits, like bash, so that values stay bounded."""
    return (number + 2**63) % 2**64 - 2**63


def _divide(a: int, b: int) -> int:
    """Divide towards zero, as in C."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _parse_number(text: str) -> int:
    return int(text, 0) if text.strip() else 0


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
    """Expands words in a shell state; ``unset_is_empty`` is set in tests, where bash treats unset names as empty."""

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
        """Return the length of an expansion that starts with $, and the result of the expansion."""
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
        # "${EMPTY[@]}" produces no field.
        return pieces or [_Piece("", split=True)]

    def _expand_home(self, line: int) -> Field:
        home = self._state.variables.get("HOME")
        return home if isinstance(home, str) else Unknown("$HOME is not set", line, unset="HOME")


def _get_text(value: Field) -> str:
    return value.prefix if isinstance(value, Unknown) else value


def concatenate(values: Iterator[Field]) -> Field:
    """Concatenate the parts of one value; Unknown if one of them is Unknown."""
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
    """Join pieces into fields, splitting at the blanks of pieces with ``split``."""
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
