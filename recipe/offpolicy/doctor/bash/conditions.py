"""Evaluation of ``[[ ... ]]``, ``[ ... ]`` and ``test``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from pathlib import Path

from .shell_values import PATTERN, Field, ShellState, Unknown

Truth = bool | Unknown
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_FILES: dict[str, Callable[[Path], bool]] = {
    "-f": Path.is_file,
    "-d": Path.is_dir,
    "-e": Path.exists,
    "-s": lambda path: path.is_file() and path.stat().st_size > 0,
    "-L": Path.is_symlink,
    "-r": Path.exists,
    "-x": Path.exists,
}


class Condition:
    """One test of expanded words.

    Args:
        words: operators and operands.
        patterns: whether the operand after = and != is a pattern, as in [[ ]].
    """

    def __init__(self, words: list[Field], state: ShellState, line: int, *, patterns: bool = False) -> None:
        self._words, self._state, self._line, self._patterns = words, state, line, patterns
        self._place = 0

    def evaluate(self) -> Truth:
        """Evaluate the test; Unknown, with the reason, if it depends on an unknown value."""
        if not self._words:
            return False
        result = self._parse_or()
        if self._place < len(self._words):
            return Unknown(f"the test of line {self._line} is not supported", self._line)
        return result

    def _peek(self, ahead: int = 0) -> Field | None:
        place = self._place + ahead
        return self._words[place] if place < len(self._words) else None

    def _parse_or(self) -> Truth:
        result = self._parse_and()
        while self._peek() in ("||", "-o"):
            self._place += 1
            other = self._parse_and()
            result = _or(result, other)
        return result

    def _parse_and(self) -> Truth:
        result = self._parse_one()
        while self._peek() in ("&&", "-a"):
            self._place += 1
            other = self._parse_one()
            result = _negate(_or(_negate(result), _negate(other)))
        return result

    def _parse_one(self) -> Truth:
        word = self._peek()
        if word == "!":
            self._place += 1
            return _negate(self._parse_one())
        if word == "(":
            self._place += 1
            result = self._parse_or()
            self._place += 1
            return result
        binary = self._peek(1)
        if isinstance(binary, str) and (binary in _NUMBERS or binary in ("=", "==", "!=", "=~", "<", ">")):
            self._place += 3
            return self._compare(word, binary, self._words[self._place - 1] if self._place <= len(self._words) else "")
        if isinstance(word, str) and re.fullmatch(r"-[a-zA-Z]", word) and binary is not None:
            self._place += 2
            return self._evaluate_unary(word, binary)
        self._place += 1
        word = _or_empty(word or "")
        return word if isinstance(word, Unknown) else bool(word)

    def _evaluate_unary(self, operator: str, operand: Field) -> Truth:
        if operator == "-v" and isinstance(operand, str):
            return operand in self._state.variables
        if isinstance(operand, Unknown):
            # A test treats an unset variable as empty.
            return operand if not operand.may_be_empty else operator == "-z"
        if operator in ("-z", "-n"):
            return bool(operand) is (operator == "-n")
        if operator in _FILES:
            return self._test_file(operator, operand)
        return Unknown(f"the test {operator} of line {self._line} is not supported", self._line)

    def _test_file(self, operator: str, operand: str) -> bool:
        files = self._state.files
        found = bool(operand) and (files.all_exist or _FILES[operator](self._state.directory / operand))
        if operand and not found:
            files.missing.append(operand)
        return found

    def _compare(self, left: Field | None, operator: str, right: Field) -> Truth:
        left, right = _or_empty(left or ""), _or_empty(right)
        for operand in (left, right):
            if isinstance(operand, Unknown):
                return operand
        assert isinstance(left, str)
        assert isinstance(right, str)
        if len(right) > PATTERN and (self._patterns or operator == "=~"):
            return Unknown(f"a pattern of {len(right)} characters is not supported", self._line)
        if operator in _NUMBERS:
            try:
                # Bash treats an empty operand of [[ ]] as 0.
                return _NUMBERS[operator](int(left or 0), int(right or 0))
            except ValueError:
                return Unknown(f"{left!r} {operator} {right!r} does not compare integers", self._line)
        if operator == "=~":
            try:
                return re.search(right, left) is not None
            except re.error:
                return Unknown(f"the expression {right!r} is not supported", self._line)
        if operator in ("<", ">"):
            return left < right if operator == "<" else left > right
        same = fnmatch.fnmatchcase(left, right) if self._patterns else left == right
        return same if operator != "!=" else not same


def _or_empty(value: Field) -> Field:
    return "" if isinstance(value, Unknown) and value.may_be_empty else value


def _negate(truth: Truth) -> Truth:
    return truth if isinstance(truth, Unknown) else not truth


def _or(first: Truth, second: Truth) -> Truth:
    if first is True or second is True:
        return True
    return first if isinstance(first, Unknown) else second
