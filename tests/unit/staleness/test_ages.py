"""Ages of rows, versions of tokens, and the rate at which prompts are issued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

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
        StalenessError, match=r"sequence u_0_0 .*eta=0, which applied .* step 7, allows at most 0\. 1 of 2"
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
    """Mini-batch 0 is all too old, of mini-batch 1 one row is, and what is left of mini-batch 2 is padding."""
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
