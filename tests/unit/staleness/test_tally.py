"""Counts and lengths of a run, by hand."""

from __future__ import annotations

import math

from recipe.offpolicy.staleness.ages import RowTag
from recipe.offpolicy.staleness.buffer import Tally

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
