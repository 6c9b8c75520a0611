"""Tables on a console, and what a table of lengths says of columns without a value."""

from __future__ import annotations

import math

import pytest

from recipe.offpolicy.analysis.lengths.curves import NAMES, LengthStep, explain_missing
from recipe.offpolicy.analysis.pages import Column, Table, open_console, print_blocks, print_table


def test_a_wide_table_is_split_and_a_long_title_broken(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = [round(1000.125 + place, 3) for place in range(20)]
    table = Table([Column("row"), *(Column(f"column {at}") for at in range(20))], [["a", *numbers]], "title " * 40)
    print_table(open_console(), table)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert all(f"{number:.3f}" in shown for number in numbers)


def test_blocks_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_blocks(open_console(), Table([Column("a")], [[1]], "T"), "", "word [b] " * 40)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].strip() == "T"
    assert shown[-1] == "word [b] " * 40


def _step(**lengths: float) -> LengthStep:
    return LengthStep(1, dict.fromkeys(NAMES, math.nan) | lengths, 0.5)


def test_columns_without_a_value_are_explained() -> None:
    whole = _step(all=5.0, right=5.0, wrong=5.0, easy=5.0, hard=5.0)
    assert not explain_missing([_step(all=5.0), whole], False, 1.0)
    assert "Train with length_penalty=none" in explain_missing([_step(all=5.0)], False, 1.0)
    assert explain_missing([_step(all=5.0, right=5.0, wrong=4.0)], False, 1.0).startswith("No value for easy, hard: ")
    assert "a score of 7 on" in explain_missing([_step(all=5.0)], True, 7.0)
