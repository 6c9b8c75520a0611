"""The rate at which prompts are issued: by hand, and on random schedules."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.offpolicy.staleness.ages import RateLimit, RateLimitError, format_eta
from tests.support.examples import at_most


def test_a_run_by_hand() -> None:
    """Batches of 4, eta 2: 12 prompts at once, then 4 a step; what is evicted and replaced changes nothing."""
    limit = RateLimit(2, 4)
    assert limit.room(1) == 12
    limit.issued(12, 1)
    assert limit.room(2) == 4
    limit.issued(4, 2)
    limit.left(2)
    assert limit.room(2) == 2
    limit.issued(2, 2)
    assert limit.state() == {"eta": "2", "account": 16}


def test_after_a_fall_nothing_is_issued_until_the_limit_holds_again() -> None:
    """A checkpoint of eta 2 after step 2 holds 8 prompts that wait: at eta 1 step 3 has room for none, step 4 for 4."""
    limit = RateLimit(1, 4)
    limit.restore(2, 8)
    assert [limit.room(3), limit.room(4)] == [0, 4]
    smaller = RateLimit(0, 4)
    smaller.restore(2, 8)
    assert [smaller.room(step) for step in (3, 4, 5)] == [-4, 0, 4]


def test_fractions_are_exact() -> None:
    assert RateLimit(0.1, 10).room(1) == 11
    assert [RateLimit(0.7, 10).room(step) for step in (1, 3)] == [17, 37]
    assert [format_eta(Fraction(eta)) for eta in ("2", "0.5")] == ["2", "0.5"]


def test_a_prompt_past_the_limit_stops() -> None:
    limit = RateLimit(0.5, 4)
    limit.issued(6, 1)
    with pytest.raises(RateLimitError, match=r"1 prompts were issued in step 1, .*eta=0\.5 allows 0 more"):
        limit.issued(1, 1)


schedules = st.tuples(
    st.sampled_from(["0", "0.1", "0.25", "0.5", "1", "1.5", "2", "3", "8"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
"""eta as written, prompts of an update, updates in a step, steps, and a seed of what happens meanwhile."""


@settings(max_examples=at_most(1000))
@given(schedules)
def test_the_limit_holds_and_no_schedule_ends_without_prompts(schedule: tuple[str, int, int, int, int]) -> None:
    """Groups fail, are evicted and replaced, checkpoints are resumed with and without what waited: after every issue
    the limit holds, and an update always finds a mini-batch of prompts.

    Prompts are trained in the order of issue, so that the oldest is as old as the limit says and no older.
    """
    eta, prompts, updates, steps, seed = schedule
    batch, chance = prompts * updates, random.Random(seed)
    limit, ahead = RateLimit(float(eta), batch), Fraction(eta)
    waiting: list[int] = []  # the step in which each was issued

    def issue(step: int) -> None:
        if (room := limit.room(step)) > 0:
            limit.issued(room, step)
            waiting.extend([step] * room)
        version = step - 1
        assert limit.account <= (version + 1 + ahead) * batch
        assert (limit.account - 1) // batch <= version + math.ceil(ahead)

    for step in range(1, steps + 1):
        issue(step)
        for _ in range(updates):
            if gone := min(chance.choice([0, 0, 0, 1, 2, 6]), len(waiting)):
                del waiting[chance.choice([slice(None, gone), slice(-gone, None)])]
                limit.left(gone)
                issue(step)
            assert len(waiting) >= prompts
            trained = waiting[:prompts]
            del waiting[:prompts]
            assert all(step - issued <= math.ceil(ahead) for issued in trained)
        assert limit.account == step * batch + len(waiting)
        if chance.random() < 0.2:
            if chance.random() < 0.5:
                waiting.clear()
            limit = RateLimit(float(eta), batch)
            limit.restore(step, len(waiting))
            # verl issues again what was running.
            waiting[len(waiting) // 2 :] = [step + 1] * (len(waiting) - len(waiting) // 2)
