"""Integer arithmetic of ``$((...))``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

from .budget import PATTERN

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
        numbers: values of the variables in it; missing and empty ones are 0.

    Raises:
        ValueError: the expression is not integer arithmetic.
    """
    # Inside $((...)) a variable needs no $; && || ! become Python's operators, so that its parser can be used.
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
