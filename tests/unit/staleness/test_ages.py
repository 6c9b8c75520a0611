"""Ages of rows from their tags, and which of them may leave a mini-batch."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from recipe.offpolicy.staleness.ages import (
    AgeLimit,
    RowTag,
    StalenessError,
    check_ages,
    check_newest,
    find_too_old,
    read_tags,
    split_too_old,
)


def rows(*versions: int, padding: int = 0) -> list[RowTag]:
    return [
        RowTag(f"u{i}_0_0", v, v, v + 1, 3, is_padding=i >= len(versions) - padding) for i, v in enumerate(versions)
    ]


def test_rows_of_before_a_checkpoint_have_the_limit_of_then() -> None:
    limit = AgeLimit(Fraction(1))
    limit.restore(3, "2.5")
    assert [limit.get_oldest(issued) for issued in (1, 3, 4)] == [3, 3, 1]
    assert find_too_old(rows(0, 1, 2, 3, 4), 6, limit) == [0, 1, 3]
    limit.restore(3, None)
    assert limit.get_oldest(3) == math.inf
    wider = AgeLimit(Fraction(4))
    wider.restore(3, "1")
    assert wider.admits(1, 2, 6)


def test_a_row_has_the_limit_of_the_step_in_which_its_prompt_was_issued() -> None:
    """eta is 2 until step 4, 1.5 from step 5 on and 0 from step 7 on."""
    limit = AgeLimit(Fraction(2))
    limit.change(5, Fraction("1.5"))
    limit.change(7, Fraction(0))
    assert [limit.get_oldest(issued) for issued in (1, 4, 5, 6, 7, 8)] == [2, 2, 2, 2, 0, 0]
    assert [limit.get_eta(issued) for issued in (4, 6, 9)] == [2, Fraction(3, 2), 0]
    row = RowTag("u_0_0", version=6, newest=6, issued=7, length=3, is_padding=False)
    older = RowTag("v_0_0", version=5, newest=5, issued=6, length=3, is_padding=False)
    assert find_too_old([row, older], 7, limit) == []
    with pytest.raises(
        StalenessError, match=r"sequence u_0_0 .*eta=0, in force .* issued in step 7, allows 0\. 1 of 2"
    ):
        check_ages([row, older], 8, limit)
    again = AgeLimit(Fraction(1))
    again.restore(8, "0", limit.state())
    assert [again.get_oldest(issued) for issued in (4, 6, 7, 8, 9)] == [2, 2, 0, 0, 1]


def test_tags_are_read_and_one_without_a_version_is_refused() -> None:
    tag = {"min_global_steps": 2, "max_global_steps": 4, "global_steps": 3, "response_len": 7}
    assert read_tags(["a_0_0", "b_0_0"], [tag, tag | {"is_padding": True, "max_global_steps": None}]) == [
        RowTag("a_0_0", 2, 4, 3, 7, is_padding=False),
        RowTag("b_0_0", 2, 2, 3, 7, is_padding=True),
    ]
    with pytest.raises(StalenessError, match=r"sequence c_0_0 does not name"):
        read_tags(["c_0_0"], [{"response_len": 7}])


def test_a_row_that_names_weights_of_later_is_found() -> None:
    check_newest({"a_0_0": {"max_global_steps": 4}, "b_0_0": {"max_global_steps": None}, "c_0_0": {}}, 5, "2")
    with pytest.raises(
        StalenessError, match=r"sequence b_0_0 .* in step 5 .* version 5 .* version 4 is the newest .*eta=2"
    ):
        check_newest({"a_0_0": {"max_global_steps": 4}, "b_0_0": {"max_global_steps": 5}}, 5, "2")


def test_a_mini_batch_keeps_a_token() -> None:
    """Mini-batch 0 is all too old, of mini-batch 1 one row is, and what is left of mini-batch 2 is padding."""
    mini_batch = [0, 0, 1, 1, 2, 2]
    assert split_too_old([0, 1, 2, 4], rows(*[1] * 6, padding=1), mini_batch) == ({2}, {0, 1, 4})
