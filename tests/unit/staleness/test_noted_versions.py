"""Chunks held against the tokens of their row, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from recipe.offpolicy.batch.weight_versions import UNKNOWN, Chunk
from recipe.offpolicy.staleness.ages import (
    count_lost,
    list_runs,
)


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
