"""Supports of a micro-batch: two rows, of 2 + 3 and 1 + 2 tokens, packed and padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from recipe.offpolicy.replay.batch_routes import TokenLayout
from recipe.offpolicy.support.token_supports import NOTE, ResponseTokens, SupportNote, TokenSupports, lay_out_supports

ROWS = [[1, 2, 5, 6, 7], [3, 8, 9]]
SUPPORTS = [[[5, 4], [], [7]], [[8, 1, 2], [9]]]


def nested(rows: list[list[int]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def notes() -> list[Any]:
    made = []
    for row, supports in zip(ROWS, SUPPORTS, strict=True):
        sizes = np.array([len(each) for each in supports], np.uint8)
        ids = np.array([one for each in supports for one in each], np.uint8)
        masses = np.array([1.0 if each else 0.6 for each in supports], np.float32)
        note, count = SupportNote(), len(supports)
        note.add(row[:-count], row[-count:], TokenSupports(sizes, ids, masses))
        made.append(note.finish().to_plain())
    return made


def batch(given: list[Any] | None = None) -> TensorDict:
    fields = [{} if note is None else {NOTE: note} for note in (notes() if given is None else given)]
    columns = {
        "input_ids": nested(ROWS),
        "response_mask": nested([[1, 0, 1], [1, 1]]),
        "extra_fields": NonTensorStack(*fields),
    }
    return TensorDict(columns, batch_size=2)


def layout(data: TensorDict) -> TokenLayout:
    return TokenLayout.of(data["input_ids"], torch.zeros(1, 8))


def test_supports_are_laid_out_as_the_tokens_are() -> None:
    data = batch()
    found = lay_out_supports(data, layout(data), 10)
    assert found.places.tolist() == [2, 3, 4, 6, 7]
    assert found.rows.tolist() == [0, 0, 0, 1, 1]
    assert found.within.tolist() == [2, 3, 4, 1, 2]
    assert found.ids.tolist() == [[5, 4, -1], [-1, -1, -1], [7, -1, -1], [8, 1, 2], [9, -1, -1]]
    assert (found.known.tolist(), found.unknown.tolist()) == ([0, 2, 3, 4], [1])
    assert found.masses == [pytest.approx((1.0, 1.0, 0.6)), (1.0, 1.0, 0.0)]
    assert found.bytes == 5 + 7
    assert lay_out_supports(data, layout(data), 3).truncated.tolist() == [0, 2, 4]


def test_checksums_are_those_of_the_client() -> None:
    data = batch()
    found = lay_out_supports(data, layout(data), 10)
    tokens = data["input_ids"].values()
    assert torch.equal(found.hash_rows(tokens[found.places]), found.checksums)
    assert not torch.equal(found.hash_rows(tokens[found.places - 1]), found.checksums)


def test_response_tokens_have_places_among_all_tokens() -> None:
    data = batch()
    found = ResponseTokens.of(data, data["input_ids"].offsets())
    assert found.places.tolist() == [2, 3, 4, 6, 7]
    assert found.trained.tolist() == [True, False, True, True, True]
    columns = {
        "prompts": [[1, 2], [0, 3]],
        "responses": [[5, 6, 7], [8, 9, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]],
        "response_mask": [[1, 0, 1], [1, 1, 0]],
    }
    padded = TensorDict({name: torch.tensor(rows) for name, rows in columns.items()}, batch_size=2)
    found = ResponseTokens.of(padded, data["input_ids"].offsets())
    assert found.places.tolist() == [2, 3, 4, 6, 7, 0]
    assert found.trained.tolist() == [True, False, True, True, True, False]
    assert found.read(torch.arange(6).reshape(2, 3)).tolist() == [0, 1, 2, 3, 4, 5]
