"""Rows that were seen against rows that were sent: several epochs, rows lost, changed, and seen too often."""

from __future__ import annotations

import pytest

from recipe.offpolicy.batch.row_arrival import RowArrival, are_same_rows, match_rows


@pytest.mark.parametrize(
    ("sent", "seen", "expected"),
    [
        ([], [], RowArrival(0, 0, 0, True)),
        ([3, 3, 5], [5, 3, 3], RowArrival(3, 3, 3, True)),
        ([3, 5], [3, 5, 5, 3, 3, 5], RowArrival(2, 6, 6, True)),
        ([3, 5], [3], RowArrival(2, 1, 1, False)),
        ([3, 5], [3, 6], RowArrival(2, 2, 1, False)),
        ([3, 5], [3, 3], RowArrival(2, 2, 1, False)),
        ([3, 5], [3, 5, 3], RowArrival(2, 3, 2, False)),
        ([], [4], RowArrival(0, 1, 0, False)),
    ],
)
def test_matched(sent: list[int], seen: list[int], expected: RowArrival) -> None:
    assert match_rows(sent, seen) == expected


def test_rows_are_the_same_each_as_often_as_was_said() -> None:
    assert are_same_rows([-(2**63), 2**63 - 1], [2**63 - 1, -(2**63)])
    assert are_same_rows([3, 5], [5, 3, 3, 5], times=2)
    assert are_same_rows([], [], times=3)
    # 3 twice and 5 twice, of 3 once and 5 thrice.
    assert not are_same_rows([3, 5], [5, 3, 5, 5], times=2)
    assert not are_same_rows([3, 5], [3, 5], times=2)
    assert not are_same_rows([3, 5], [3, 6])
