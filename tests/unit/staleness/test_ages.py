"""Ages of rows, versions of tokens, and the rate at which prompts are issued."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.offpolicy.batch.weight_versions import UNKNOWN, Chunk
from recipe.offpolicy.staleness.ages import (
    AgeLimit,
    RateLimit,
    RateLimitError,
    RowTag,
    StalenessError,
    check_ages,
    count_lost,
    find_too_old,
    list_runs,
    read_tags,
    split_too_old,
)
from tests.support.examples import at_most


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
    """eta is 2 until step 4, 1.5 from step 5 on, and 0 from step 7 on."""
    limit = AgeLimit(Fraction(2))
    limit.change(5, Fraction("1.5"))
    limit.change(7, Fraction(0))
    assert [limit.get_oldest(issued) for issued in (1, 4, 5, 6, 7, 8)] == [2, 2, 2, 2, 0, 0]
    assert [limit.get_eta(issued) for issued in (4, 6, 9)] == [2, Fraction(3, 2), 0]
    row = RowTag("u_0_0", version=6, newest=6, issued=7, length=3, is_padding=False)
    older = RowTag("v_0_0", version=5, newest=5, issued=6, length=3, is_padding=False)
    assert find_too_old([row, older], 7, limit) == []
    with pytest.raises(
        StalenessError, match=r"sequence u_0_0 is too old: .* age is 0, .*eta was 0 when .* step 7\. 1 of 2"
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
    with pytest.raises(StalenessError, match=r"sequence c_0_0 does not contain"):
        read_tags(["c_0_0"], [{"response_len": 7}])


def test_a_mini_batch_keeps_a_token() -> None:
    """All of mini-batch 0 and one row of mini-batch 1 are too old, and the rest of mini-batch 2 is padding."""
    mini_batch = [0, 0, 1, 1, 2, 2]
    assert split_too_old([0, 1, 2, 4], rows(*[1] * 6, padding=1), mini_batch) == ({2}, {0, 1, 4})


# Chunks held against the tokens of their row, by hand


def test_runs_of_each_row() -> None:
    masks = [[1, 1, 0, 0, 1], [1, 1, 1], [0, 0], [0, 1], []]
    nested = torch.nested.as_nested_tensor([torch.tensor(mask).long() for mask in masks], layout=torch.jagged)
    assert list_runs(nested) == [[2, 1], [3], [], [1], []]


@pytest.mark.parametrize(
    ("turns", "runs", "lost"),
    [
        ([[(3, 2), (4, 5)], [(4, 1)]], [7, 1], 0),
        # verl has cut the end of the response.
        ([[(3, 2), (4, 5)], [(4, 9)]], [7, 1], 0),
        ([[(3, 2), (4, 5)], [(4, 9)]], [7], 0),
        # A chunk of 5 is gone; the length of the last turn says nothing of that of the first.
        ([[(3, 2)], [(4, 9)]], [7, 1], 5),
        ([[(3, 2), (UNKNOWN, 5)]], [7], 5),
        ([[(3, 2), (UNKNOWN, 5)]], [7, 4], 5),
        # An agent loop with a new request id each turn hands on the chunks of one of them.
        ([[(3, 2)]], [2, 5], 0),
        ([], [5], 0),
        ([], [], 0),
    ],
)
def test_tokens_without_a_chunk(turns: Sequence[Sequence[Chunk]], runs: Sequence[int], lost: int) -> None:
    assert count_lost(turns, runs) == lost


# The rate at which prompts are issued: by hand, and on random schedules


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
"""eta as written, prompts per update, updates per step, steps, and a seed for random events."""


@settings(max_examples=at_most(1000))
@given(schedules)
def test_the_limit_holds_and_no_schedule_ends_without_prompts(schedule: tuple[str, int, int, int, int]) -> None:
    """Groups fail, are evicted and replaced, and checkpoints are resumed with and without waiting prompts: after every
    issue, the limit holds, and an update always finds a mini-batch of prompts.

    Prompts are trained in the order of their issue, so the oldest is exactly as old as the limit allows.
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
