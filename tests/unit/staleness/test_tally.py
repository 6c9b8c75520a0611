"""Waiting prompts, and counts and lengths of a run, by hand."""

from __future__ import annotations

import math

import pytest

from recipe.offpolicy.staleness.ages import RowTag
from recipe.offpolicy.staleness.buffer import Tally, keeps_deadlines


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
    """The first prompt may wait until step 5; it replaces one of four that may not."""
    assert not keeps_deadlines([5, 3, 3, 3, 3], step=2, batch=4, left=0)
    assert keeps_deadlines([5, 3, 3, 3, 3], step=2, batch=4, left=1)


# Counts and lengths of a run, by hand


ROOT = "offpolicy/staleness"


def row(length: int, version: int, newest: int) -> RowTag:
    return RowTag("u_0_0", version, newest, version + 1, length, is_padding=False)


def test_counts_are_of_the_step_and_lengths_of_the_run() -> None:
    tally = Tally()
    tally.issued, tally.lost, tally.waited = 4, 1, 2.5
    tally.add_rows([row(10, 4, 4), row(30, 2, 3)], [row(40, 0, 0)], step=5)
    tally.add_ages(1.0, 30.0, update=0, updates=2)
    tally.add_ages(0.5, 10.0, update=1, updates=2)
    tally.add_ages(math.nan, 0.0, update=1, updates=2)
    tally.spans.add([1, 2, 3])
    assert tally.metrics(0.5, 0.25) == {
        f"{ROOT}/eta": 0.5,
        f"{ROOT}/issued": 4.0,
        f"{ROOT}/room": 0.0,
        f"{ROOT}/waited_seconds": 2.5,
        f"{ROOT}/waited_share": 0.25,
        f"{ROOT}/refreshed": 0.0,
        f"{ROOT}/masked_token_share": 0.5,
        f"{ROOT}/lost_prompts": 1.0,
        f"{ROOT}/length_ratio": 2.0,
        # The first is of the newest weights, the second took a version and waited for one.
        f"{ROOT}/in_flight": 0.5,
        f"{ROOT}/in_queue": 0.5,
        f"{ROOT}/spans": 2.0,
        # (30 * 2 + 10 * (1 + 1)) / 40
        f"{ROOT}/updates_mean": 2.0,
    }
    tally.begin()
    after = tally.metrics(0.5, 0.25)
    assert [after[f"{ROOT}/{name}"] for name in ("issued", "lost_prompts", "masked_token_share")] == [0.0, 0.0, 0.0]
    assert after[f"{ROOT}/length_ratio"] == 2.0
    assert all(math.isnan(after[f"{ROOT}/{name}"]) for name in ("in_flight", "in_queue", "spans", "updates_mean"))
