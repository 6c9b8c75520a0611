"""Rows that were seen against rows that were sent: several epochs, rows lost, changed, seen too often, and gone."""

from __future__ import annotations

import pytest

from recipe.offpolicy.batch.seals import are_same_rows, find_difference

SENT = {"a": 3, "b": 5, "c": 5, "d": 7}
OLD = {"d": "too old", "x": "elsewhere"}


@pytest.mark.parametrize(
    ("seen", "left", "epochs"), [([5, 3, 7, 5], {}, 1), ([3, 5, 5], OLD, 1), ([3, 5, 5, 5, 3, 5], OLD, 2)]
)
def test_exactly_the_rows_that_have_not_left(seen: list[int], left: dict[str, str], epochs: int) -> None:
    assert find_difference(SENT, seen, left, epochs) is None


@pytest.mark.parametrize(
    ("seen", "epochs", "said"),
    [
        ([3, 5], 1, "3 of 4 rows expected (1 left: too old), 2 seen: 2 missing or changed (b, c)"),
        ([3, 5, 5, 7], 1, "3 of 4 rows expected (1 left: too old), 4 seen: 1 had left (d)"),
        ([3, 3, 5, 5], 1, "3 of 4 rows expected (1 left: too old), 4 seen: 1 too often (a)"),
        ([3, 5, 5, 3, 5, 5], 1, "3 of 4 rows expected (1 left: too old), 6 seen: 3 too often (a, b, c)"),
        ([3, 5, 5], 2, "3 of 4 rows expected (1 left: too old), 2 epochs, 3 seen: 3 missing or changed (a, b, c)"),
        (
            [4, 5, 5],
            1,
            "3 of 4 rows expected (1 left: too old), 3 seen: 1 missing or changed (a), 1 not sent with this content",
        ),
    ],
)
def test_what_differs_is_named_by_row(seen: list[int], epochs: int, said: str) -> None:
    assert find_difference(SENT, seen, OLD, epochs) == said


def test_rows_are_the_same_each_as_often_as_was_said() -> None:
    assert are_same_rows([-(2**63), 2**63 - 1], [2**63 - 1, -(2**63)])
    assert are_same_rows([3, 5], [5, 3, 3, 5], times=2)
    assert are_same_rows([], [], times=3)
    assert not are_same_rows([3, 5], [5, 3, 5, 5], times=2)
    assert not are_same_rows([3, 5], [3, 5], times=2)
    assert not are_same_rows([3, 5], [3, 6])
