"""Checks as table rows of key, predicate, reason and fix, and the function that evaluates the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...correction.problem import EVERYTHING, Problem, Verdict
from ..composed import Composed

Check = Callable[[Composed], Iterator[Problem]]
"""A function that yields the problems of a composed configuration."""


@dataclass(frozen=True)
class Row:
    """One problem that a key may have.

    Attributes:
        key: the key that is reported.
        wrong: takes the composed configuration and the key's value; returns whether the value is wrong.
        reason, fix: format strings with the fields ``{run...}`` and ``{value}``.
        to: the value that fixes the problem; ``...`` if there is no single such value.
        alongside: other keys whose values make the reported value wrong.
    """

    key: str
    wrong: Callable[[Composed, Any], object]
    reason: str
    fix: str = ""
    to: Any = ...
    verdict: Verdict = "ERROR"
    alongside: tuple[str, ...] = ()


def run_rows(run: Composed, rows: tuple[Row, ...], parts: tuple[str, ...] = EVERYTHING) -> Iterator[Problem]:
    """Yield the problems that the rows find; all of them concern these parts."""
    for row in rows:
        if row.wrong(run, value := run.get(row.key)):
            reason, fix = (text.format(run=run, value=value) for text in (row.reason, row.fix))
            sets = {} if row.to is ... else {row.key: row.to}
            yield run.problem(row.key, reason, fix, sets, parts, row.verdict, row.alongside)
