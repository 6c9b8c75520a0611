"""Whether prompts that wait can all be trained in time, by hand."""

from __future__ import annotations

import pytest

from recipe.offpolicy.staleness.buffer import keeps_deadlines


@pytest.mark.parametrize(
    ("issued", "left", "kept"),
    [
        # Those of step 1 may be trained until step 3: 4 in step 2 alone, and 4 more in step 3.
        ([1] * 8, 4, True),
        ([1] * 9, 4, False),
        # 4 of step 1 take all of step 3, and step 4 has room for 4 of step 2.
        ([1] * 4 + [2] * 4, 0, True),
        ([1] * 4 + [2] * 5, 0, False),
        # Too late by any order.
        ([-1], 0, False),
    ],
)
def test_a_step_trains_four_prompts_and_ages_of_two_are_allowed(issued: list[int], left: int, kept: bool) -> None:
    assert keeps_deadlines([each + 2 for each in sorted(issued)], step=2, batch=4, left=left) is kept


def test_prompts_are_handed_out_in_the_order_of_their_issue() -> None:
    """The first may wait until step 5, and takes the place of one of four that may not."""
    assert not keeps_deadlines([5, 3, 3, 3, 3], step=2, batch=4, left=0)
    assert keeps_deadlines([5, 3, 3, 3, 3], step=2, batch=4, left=1)
