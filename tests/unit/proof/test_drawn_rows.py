"""The rows that are proved at an update, by hand."""

from __future__ import annotations

import torch

from recipe.offpolicy.trainer.supervision import ENOUGH, draw_rows


def test_a_first_proof_sees_the_first_the_last_and_the_longest_row_of_each_rank() -> None:
    tokens = torch.tensor([300, 1, 1, 900, 1, 1, 300, 1, 0, 5, 1, 1, 1, 2, 1, 400])
    drawn = draw_rows(tokens, 2, seed="1", first=True)
    # Of rank 0 rows 0, 7 and 3; of rank 1 rows 9, 15, which is the longest too; and one at random of each.
    assert {0, 3, 7, 9, 15} <= set(drawn.nonzero().flatten().tolist())
    assert 5 <= int((drawn > 0).sum()) <= 7
    assert (drawn == 2).nonzero().flatten().tolist() == [3, 15]
    assert drawn[8] == 0  # no response


def test_short_rows_are_drawn_until_they_are_enough() -> None:
    tokens = torch.full((1000,), 10)
    assert int((draw_rows(tokens, 1, seed="1", first=True) > 0).sum()) == -(-ENOUGH // 10)
    assert int(draw_rows(tokens[:7], 1, seed="1", first=True).sum()) == 8  # one of them with trials


def test_a_rank_without_a_response_is_asked_nevertheless() -> None:
    assert draw_rows(torch.tensor([0, 0, 4, 4]), 2, seed="1", first=False)[:2].sum() == 2
