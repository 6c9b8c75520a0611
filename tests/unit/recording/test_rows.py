"""Ragged rows in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from recipe.offpolicy.recording import Rows
from tests.support.recordings import drawn_rows, same


def test_tokens_know_their_row_and_place() -> None:
    rows = drawn_rows([2, 0, 3])
    assert (len(rows), rows.tokens) == (3, 5)
    assert rows.row_of_token.tolist() == [0, 0, 2, 2, 2]
    assert rows.position.tolist() == [0, 1, 0, 1, 2]


def test_staleness_counts_from_the_weights_that_the_step_began_with() -> None:
    """Step 5 begins with the weights of version 4: rows of versions 4, 2 and 5 are 0, 2 and 0 old; -1 is unknown."""
    rows = drawn_rows([1, 1, 1, 1], step=5, oldest_version=np.array([4, 2, 5, -1]))
    assert rows.staleness.tolist() == [0, 2, 0, -1]


def test_staleness_by_token_falls_back_on_the_row() -> None:
    """In step 5 rows of 3, 1 and 1 tokens: two versions and an unknown token; unknown but for the row; unknown."""
    rows = drawn_rows(
        [3, 1, 1],
        step=5,
        oldest_version=np.array([1, 2, -1]),
        newest_version=np.array([4, 3, -1]),
        version=np.array([2, 4, -1, -1, -1], dtype=np.int32),
    )
    assert rows.token_staleness.tolist() == [2, 0, 3, 2, -1]


def test_padded_columns() -> None:
    rows = drawn_rows([2, 0, 1], log_prob=np.array([-1.0, -2.0, -3.0], dtype=np.float32))
    padded = rows.padded("log_prob", "rejected_by")
    assert padded["log_prob"].tolist() == [[-1.0, -2.0], [0.0, 0.0], [-3.0, 0.0]]
    assert padded["response_mask"].tolist() == [[True, True], [False, False], [True, False]]
    assert padded["rejected_by"].dtype == torch.int64


def test_rows_between_two_are_those_taken_without_a_copy() -> None:
    rows = drawn_rows([2, 0, 3, 1])
    rows = replace(rows, extensions={"offpolicy_x": np.arange(6, dtype=np.float32)})
    middle = rows.between(1, 3)
    assert same(middle, rows.take([1, 2]))
    assert middle.extensions["offpolicy_x"].tolist() == [2, 3, 4]
    assert np.shares_memory(middle.log_prob, rows.log_prob)
    assert same(rows.between(0, 4), rows)


def test_rows_are_frozen() -> None:
    rows: Rows = drawn_rows([1])
    with pytest.raises(AttributeError):
        rows.step = rows.step  # type: ignore[misc]
