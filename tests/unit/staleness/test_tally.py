"""Counts and lengths of a run, by hand."""

from __future__ import annotations

import math

from recipe.offpolicy.staleness.tally import Tally

ROOT = "offpolicy/staleness"


def test_counts_are_of_the_step_and_lengths_of_the_run() -> None:
    tally = Tally()
    tally.issued, tally.lost, tally.waited = 4, 1, 2.5
    tally.add_rows([10, 30], [40])
    assert tally.metrics(0.5) == {
        f"{ROOT}/eta": 0.5,
        f"{ROOT}/issued": 4.0,
        f"{ROOT}/room": 0.0,
        f"{ROOT}/waited_seconds": 2.5,
        f"{ROOT}/refreshed": 0.0,
        f"{ROOT}/masked_token_share": 0.5,
        f"{ROOT}/lost_prompts": 1.0,
        f"{ROOT}/length_ratio": 2.0,
    }
    tally.begin()
    after = tally.metrics(0.5)
    assert [after[f"{ROOT}/{name}"] for name in ("issued", "lost_prompts", "masked_token_share")] == [0.0, 0.0, 0.0]
    assert after[f"{ROOT}/length_ratio"] == 2.0


def test_a_ratio_of_nothing_is_nan() -> None:
    assert math.isnan(Tally().metrics(1)[f"{ROOT}/length_ratio"])
