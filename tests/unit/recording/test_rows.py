"""Ragged rows in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.recording import Rows, concatenate
from recipe.offpolicy.recording.schema import spread_versions
from tests.support.recordings import drawn_rows, same

LENGTHS = st.lists(st.integers(0, 5), max_size=6)


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


def test_the_version_of_a_row_with_a_single_one_is_that_of_its_tokens() -> None:
    mask = np.array([True, False, True, True])
    spread = spread_versions(np.array([3, 4]), np.array([3, 5]), mask, np.array([0, 3, 4]))
    assert (spread.tolist(), spread.dtype) == ([3, -1, 3, -1], np.int32)


def test_padded_columns() -> None:
    rows = drawn_rows([2, 0, 1], log_prob=np.array([-1.0, -2.0, -3.0], dtype=np.float32))
    padded = rows.padded("log_prob", "rejected_by")
    assert padded["log_prob"].tolist() == [[-1.0, -2.0], [0.0, 0.0], [-3.0, 0.0]]
    assert padded["response_mask"].tolist() == [[True, True], [False, False], [True, False]]
    assert padded["rejected_by"].dtype == torch.int64


def test_taken_rows_in_another_order() -> None:
    rows = drawn_rows([2, 1, 3], log_prob=np.arange(6, dtype=np.float32))
    taken = rows.take([2, 0])
    assert taken.log_prob.tolist() == [3.0, 4.0, 5.0, 0.0, 1.0]
    assert taken.offsets.tolist() == [0, 3, 5]
    assert taken.uid.tolist() == [rows.uid[2], rows.uid[0]]
    assert taken.prompt_ids.tolist() == [*rows.prompt_ids[4:6], *rows.prompt_ids[:2]]


@given(LENGTHS, LENGTHS)
def test_parts_put_together_are_what_they_were(one: list[int], other: list[int]) -> None:
    parts = [drawn_rows(one), drawn_rows(other, seed=1)]
    both = concatenate(parts)
    cut = len(one)
    assert same(both.take(range(cut)), parts[0])
    assert same(both.take(range(cut, len(both))), parts[1])


@given(LENGTHS)
def test_taking_all_changes_nothing(lengths: list[int]) -> None:
    rows = drawn_rows(lengths)
    assert same(rows.take(range(len(rows))), rows)


def test_rows_between_two_are_those_taken_without_a_copy() -> None:
    rows = drawn_rows([2, 0, 3, 1])
    rows = replace(rows, extensions={"offpolicy_x": np.arange(6, dtype=np.float32)})
    middle = rows.between(1, 3)
    assert same(middle, rows.take([1, 2]))
    assert middle.extensions["offpolicy_x"].tolist() == [2, 3, 4]
    assert np.shares_memory(middle.log_prob, rows.log_prob)
    assert same(rows.between(0, 4), rows)


def test_nothing_cannot_be_put_together() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        concatenate([])


def test_rows_are_frozen() -> None:
    rows: Rows = drawn_rows([1])
    with pytest.raises(AttributeError):
        rows.step = rows.step  # type: ignore[misc]
