"""Ragged rows in memory, and how they are packed for the transfer to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.recording import Rows
from recipe.offpolicy.recording.writer import Seen, pack, unpack
from tests.support.examples import at_most
from tests.support.recordings import drawn_rows

MASK = torch.tensor(
    [
        [1, 1, 0, 0, 1, 0],  # two turns around two tool tokens, padded
        [0, 0, 0, 0, 0, 0],  # no token of the model's
        [1, 1, 1, 1, 1, 1],
        [0, 1, 0, 1, 1, 0],  # begins with a tool's token
    ]
).bool()


def seen(mask: Tensor = MASK, **changes: Any) -> Seen:
    """Every number is 100 x row + 10 x column + a number that identifies the tensor."""
    rows, width = mask.shape
    place = 100.0 * torch.arange(rows)[:, None] + 10.0 * torch.arange(width)
    values: dict[str, Any] = dict(
        response_ids=place.long(),
        response_mask=mask,
        rollout_log_prob=place + 1,
        old_log_prob=place + 2,
        log_prob=place + 3,
        advantages=place + 4,
        weight=place + 5,
        valid=mask,
        rejected={},
    )
    return Seen(**(values | changes))


def recorded(what: Seen, chosen: Tensor | None = None) -> Rows:
    return unpack(pack(what, chosen), step=7, rank=2, mini_batch=1)


def test_versions_by_token_and_by_row() -> None:
    span = (torch.tensor([3, 9, 4, 5]), torch.tensor([4, 9, 4, 5]))
    by_row = recorded(seen(versions=span)).version
    assert by_row.tolist() == [-1] * 5 + [4] * 6 + [-1, 5, -1, 5, 5]
    noted = torch.where(MASK, 3, -1)
    noted[0, 4] = 4
    by_token = recorded(seen(versions=span, token_versions=noted)).version
    assert by_token.tolist() == [3, 3, -1, -1, 4] + [3] * 6 + [-1, 3, -1, 3, 3]
    assert by_row.dtype == by_token.dtype == np.int32


def test_the_thirty_second_reason_has_the_highest_bit() -> None:
    reasons = {f"masks.m{i}": torch.full((1, 1), i == 31) for i in range(32)}
    assert recorded(seen(torch.ones(1, 1).bool(), rejected=reasons)).rejected_by.tolist() == [2**31]


@settings(max_examples=at_most(60))
@given(st.data())
def test_packing_is_cutting_out_by_hand(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    bits = data.draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    mask = torch.tensor(bits).reshape(rows, width)
    chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    prompts = torch.arange(sum(lengths))
    what = seen(mask, uids=[str(i) for i in range(rows)], prompts=(prompts, torch.tensor(lengths)))
    found = recorded(what, chosen)

    kept = [row for row in range(rows) if chosen[row] and mask[row].any()]
    assert found.uid.tolist() == [str(row) for row in kept]
    for i, row in enumerate(kept):
        last = max(j for j in range(width) if mask[row, j])
        tokens = slice(found.offsets[i], found.offsets[i + 1])
        assert found.log_prob[tokens].tolist() == what.log_prob[row, : last + 1].tolist()
        assert found.response_mask[tokens].tolist() == mask[row, : last + 1].tolist()
        start = sum(lengths[:row])
        of_prompt = found.prompt_ids[found.prompt_offsets[i] : found.prompt_offsets[i + 1]]
        assert of_prompt.tolist() == list(range(start, start + lengths[row]))


def test_staleness_by_token_falls_back_on_the_row() -> None:
    """In step 5, rows of 3, 1 and 1 tokens: two versions and an unknown token; unknown except for the row; unknown."""
    rows = drawn_rows(
        [3, 1, 1],
        step=5,
        oldest_version=np.array([1, 2, -1]),
        newest_version=np.array([4, 3, -1]),
        version=np.array([2, 4, -1, -1, -1], dtype=np.int32),
    )
    assert rows.token_staleness.tolist() == [2, 0, 3, 2, -1]
