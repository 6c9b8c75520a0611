"""Rows of an extension's making, laid out as verl's workers read them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.trainer.own_forward import build_nested, build_padded, name_keys, repeat_rows

ROWS = [([5], [6, 7]), ([8, 9], [1])]


def test_rows_are_repeated_to_the_size_of_a_batch() -> None:
    assert repeat_rows(ROWS, 3) == [ROWS[0], ROWS[1], ROWS[0]]


def test_padded_columns_by_hand() -> None:
    found = {name: column.tolist() for name, column in build_padded(ROWS).items()}
    assert found == {
        "prompts": [[0, 5], [8, 9]],
        "responses": [[6, 7], [1, 0]],
        "input_ids": [[0, 5, 6, 7], [8, 9, 1, 0]],
        "attention_mask": [[0, 1, 1, 1], [1, 1, 1, 0]],
        "position_ids": [[0, 0, 1, 2], [0, 1, 2, 2]],
        "response_mask": [[1, 1], [1, 0]],
    }


@pytest.mark.verl("==0.9.1")
def test_nested_columns_keep_what_workers_read_beside_the_tokens() -> None:
    source = TensorDict({"score": torch.tensor([[0.5]])}, batch_size=1)
    found = build_nested(ROWS, source)
    assert [row.tolist() for row in found["input_ids"].unbind()] == [[5, 6, 7], [8, 9, 1]]
    assert [row.tolist() for row in found["position_ids"].unbind()] == [[0, 1, 2], [0, 1, 2]]
    assert [row.tolist() for row in found["response_mask"].unbind()] == [[1, 1], [1]]
    assert [float(row) for row in found["score"].unbind()] == [0.5, 0.5]


def test_keys_are_of_no_batch_and_all_different() -> None:
    keys = name_keys(2)
    assert keys[0].endswith("_0_0")
    assert keys[1].endswith("_1_0")
    assert not set(keys) & set(name_keys(2))
