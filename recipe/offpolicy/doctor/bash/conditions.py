"""Evaluation of ``[[ ... ]]``, ``[ ... ]``, ``test`` and arithmetic expressions."""

from __future__ import annotations

import ast
import fnmatch
import operator as op
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from .shell_values import PATTERN, Field, ShellState, Unknown, Value

Truth = bool | Unknown
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    f"-{function.__name__}": function for function in (op.eq, op.ne, op.lt, op.le, op.gt, op.ge)
}
_TEXTS = ("=", "==", "!=", "=~")
_FILES: dict[str, Callable[[Path], bool]] = {
    "-f": Path.is_file,
    "-s": lambda path: path.is_file() and path.stat().st_size > 0,
    "-d": Path.is_dir,
    **dict.fromkeys(("-e", "-r", "-x"), Path.exists),
    "-L": Path.is_symlink,
}


def evaluate_test(words: list[Field], state: ShellState, line: int, *, patterns: bool = False) -> Truth:
    """Evaluate a test of expanded words; return Unknown, with the reason, if the result depends on an unknown value.

    Args:
        patterns: whether the operand after = and != is a pattern, as in [[ ]].
    """

    def evaluate_part(part: list[Field]) -> Truth:
        return evaluate_test(part, state, line, patterns=patterns)

    for joined in ("||", "&&"):
        if joined in words:
            place = words.index(joined)
            first, second = evaluate_part(words[:place]), evaluate_part(words[place + 1 :])
            return _or(first, second) if joined == "||" else _negate(_or(_negate(first), _negate(second)))
    match words:
        case ["!", *rest]:
            return _negate(evaluate_part(rest))
        case []:
            return False
        case [word]:
            word = _or_empty(word)
            return word if isinstance(word, Unknown) else bool(word)
        case [str(operator), operand] if re.fullmatch(r"-[a-zA-Z]", operator):
            return _evaluate_unary(operator, operand, state, line)
        case [left, str(operator), right] if operator in _NUMBERS or operator in _TEXTS:
            return _compare(_or_empty(left), operator, _or_empty(right), line, patterns)
    return Unknown(f"the test of line {line} is not supported", line)


def _evaluate_unary(operator: str, operand: Field, state: ShellState, line: int) -> Truth:
    if operator == "-v" and isinstance(operand, str):
        state.unset += [operand] * (operand not in state.variables)
        return operand in state.variables
    if isinstance(operand, Unknown):
        # A test treats an unset variable as empty.
        return operand if not operand.may_be_empty else operator == "-z"
    if operator in ("-z", "-n"):
        return bool(operand) is (operator == "-n")
    if operator in _FILES:
        found = bool(operand) and _FILES[operator](state.directory / operand)
        if operand and not found:
            state.missing.append(operand)
        return found
    return Unknown(f"the test {operator} of line {line} is not supported", line)


def _compare(left: Field, operator: str, right: Field, line: int, patterns: bool) -> Truth:
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return left if isinstance(left, Unknown) else right if isinstance(right, Unknown) else False
    if len(right) > PATTERN and (patterns or operator == "=~"):
        return Unknown(f"a pattern of {len(right)} characters is not supported", line)
    try:
        if operator in _NUMBERS:
            # Bash treats an empty operand of [[ ]] as 0.
            return _NUMBERS[operator](int(left or 0), int(right or 0))
        if operator == "=~":
            return re.search(right, left) is not None
    except (ValueError, re.error):
        return Unknown(f"the test {left!r} {operator} {right!r} is not supported", line)
    same = fnmatch.fnmatchcase(left, right) if patterns else left == right
    return same if operator != "!=" else not same


def _or_empty(value: Field) -> Field:
    return "" if isinstance(value, Unknown) and value.may_be_empty else value


def _negate(truth: Truth) -> Truth:
    return truth if isinstance(truth, Unknown) else not truth


def _or(first: Truth, second: Truth) -> Truth:
    if first is True or second is True:
        return True
    return first if isinstance(first, Unknown) else second


def _divide(a: int, b: int) -> int:
    """Divide and round towards zero, as in C."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: op.add,
    ast.Sub: op.sub,
    ast.Mult: op.mul,
    ast.Div: _divide,
    ast.Mod: lambda a, b: a - b * _divide(a, b),
    ast.Pow: op.pow,
    ast.LShift: op.lshift,
    ast.RShift: op.rshift,
    ast.Eq: op.eq,
    ast.NotEq: op.ne,
    ast.Lt: op.lt,
    ast.LtE: op.le,
    ast.Gt: op.gt,
    ast.GtE: op.ge,
}
_LARGEST = 62
"""Largest exponent."""


def evaluate(expression: str, values: Mapping[str, Value]) -> int:
    """Evaluate an arithmetic expression without assignments.

    Args:
        values: values of the expression's variables; missing and empty variables count as 0.

    Raises:
        ValueError: the expression is not integer arithmetic.
    """
    # Inside $((...)) a variable needs no $; && || ! become Python's operators, so that Python's parser can be used.
    text = re.sub(r"!(?!=)", " not ", expression.replace("&&", " and ").replace("||", " or ").replace("$", ""))
    if len(text) > PATTERN:
        raise ValueError(f"{len(text)} characters")
    try:
        return _evaluate_node(ast.parse(text.strip() or "0", mode="eval").body, values)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError, KeyError) as error:
        raise ValueError(str(error)) from error


def _evaluate_node(node: ast.expr, values: Mapping[str, Value]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return int(str(values.get(name) or "0"), 0)
        case (
            ast.BinOp(left=left, op=operation, right=right)
            | ast.Compare(left=left, ops=[operation], comparators=[right])
        ):
            numbers = _evaluate_node(left, values), _evaluate_node(right, values)
            if isinstance(operation, ast.Pow | ast.LShift | ast.RShift) and not 0 <= numbers[1] <= _LARGEST:
                raise ValueError(f"the exponent {numbers[1]}")
            number = int(_OPERATIONS[type(operation)](*numbers))
            if not -(2**63) <= number < 2**63:
                raise ValueError("more than 64 bits")
            return number
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not() as sign, operand=operand):
            number = _evaluate_node(operand, values)
            return int(not number) if isinstance(sign, ast.Not) else -number if isinstance(sign, ast.USub) else number
        case ast.BoolOp(op=joined, values=parts):
            holds = [bool(_evaluate_node(part, values)) for part in parts]
            return int(all(holds) if isinstance(joined, ast.And) else any(holds))
    raise ValueError(ast.unparse(node))
