"""Ages of rows from their tags, and which of them may leave a mini-batch."""

from __future__ import annotations

import math

import pytest

from recipe.offpolicy.staleness.ages import (
    AgeLimit,
    RowTag,
    StalenessError,
    check_ages,
    check_seen,
    compute_age,
    find_too_old,
    read_tags,
    split_too_old,
)


def rows(*versions: int, padding: int = 0) -> list[RowTag]:
    return [RowTag(f"u{i}_0_0", v, v + 1, 3, is_padding=i >= len(versions) - padding) for i, v in enumerate(versions)]


def test_the_weights_of_a_step_are_those_of_the_step_before() -> None:
    assert [compute_age(version, 5) for version in (4, 3, 0)] == [0, 1, 4]


def test_rows_older_than_eta_are_too_old() -> None:
    assert find_too_old(rows(4, 3, 2, 1), 5, AgeLimit(2)) == [3]
    assert find_too_old(rows(4, 1, padding=1), 5, AgeLimit(2)) == []


def test_rows_of_before_a_checkpoint_have_the_limit_of_then() -> None:
    limit = AgeLimit(1)
    limit.restore(3, "2.5")
    assert (limit.resumed, limit.restored) == (3, 3)
    assert find_too_old(rows(0, 1, 2, 3, 4), 6, limit) == [0, 1, 3]
    limit.restore(3, None)
    assert limit.get_oldest(2) == math.inf
    wider = AgeLimit(4)
    wider.restore(3, "1")
    assert wider.admits(1, 6)


def test_tags_are_read_and_one_without_a_version_is_refused() -> None:
    tag = {"min_global_steps": 2, "global_steps": 3, "response_len": 7}
    assert read_tags(["a_0_0", "b_0_0"], [tag, tag | {"is_padding": True}]) == [
        RowTag("a_0_0", 2, 3, 7, is_padding=False),
        RowTag("b_0_0", 2, 3, 7, is_padding=True),
    ]
    with pytest.raises(StalenessError, match=r"row c_0_0 does not say"):
        read_tags(["c_0_0"], [{"response_len": 7}])


def test_the_oldest_row_is_named() -> None:
    check_ages(rows(4, 3), 5, AgeLimit(1), "1")
    with pytest.raises(StalenessError, match=r"row u2_0_0 was sampled by version 0 .* 2 of 3 rows are too old"):
        check_ages(rows(3, 2, 0), 5, AgeLimit(1), "1")


def test_the_loss_may_see_what_entered_it() -> None:
    check_seen(1.0, rows(4, 3), 5, "1")
    check_seen(0.0, rows(4, 3), 5, "1")
    with pytest.raises(StalenessError, match="a row that is 2 versions old"):
        check_seen(2.0, rows(4, 3), 5, "1")


def test_a_mini_batch_keeps_a_token() -> None:
    """Mini-batch 0 is all too old, of mini-batch 1 one row is, and what is left of mini-batch 2 is padding."""
    mini_batch = [0, 0, 1, 1, 2, 2]
    assert split_too_old([0, 1, 2, 4], rows(*[1] * 6, padding=1), mini_batch) == ({2}, {0, 1, 4})
