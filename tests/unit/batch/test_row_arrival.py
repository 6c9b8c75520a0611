"""Rows that were seen against rows that were sent: several epochs, rows lost, changed, and seen too often."""

from __future__ import annotations

import pytest

from recipe.offpolicy.batch.row_arrival import RowArrival, match_rows


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
