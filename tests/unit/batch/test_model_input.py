"""The hash of the model's input is that of its tokens and positions, in either layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from recipe.offpolicy.batch.seals import hash_model_input

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def build(lengths: list[int], axes: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tokens (L,) and positions (L,), or (axes, L), of each sequence."""
    random = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 150_000, (length,), generator=random) for length in lengths]
    shape = (axes,) if axes else ()
    return tokens, [torch.randint(0, 40_000, (*shape, length), generator=random) for length in lengths]


def nest(tokens: list[torch.Tensor], positions: list[torch.Tensor]) -> TensorDict:
    def nested(rows: list[torch.Tensor]) -> Any:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return TensorDict({"input_ids": nested(tokens), "position_ids": nested(positions)}, len(tokens))


def pad_left(tokens: list[torch.Tensor], positions: list[torch.Tensor]) -> TensorDict:
    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        turned = pad_sequence([row.flip(-1).movedim(-1, 0) for row in rows], batch_first=True, padding_value=7)
        return turned.flip(1).movedim(1, -1)

    there = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True).flip(1)
    columns = {"input_ids": padded(tokens), "position_ids": padded(positions), "attention_mask": there}
    return TensorDict(columns, len(tokens))


@given(LENGTHS, st.sampled_from([0, 3, 4]), st.integers(0, 99))
def test_both_layouts_have_one_hash(lengths: list[int], axes: int, seed: int) -> None:
    sequences = build(lengths, axes, seed)
    assert torch.equal(hash_model_input(nest(*sequences)), hash_model_input(pad_left(*sequences)))


@pytest.mark.parametrize("lengths", [[3, 3], [3, 5], [4]])
@pytest.mark.parametrize("axes", [0, 4])
@pytest.mark.parametrize("what", ["a token", "a position", "tokens exchanged", "positions exchanged"])
def test_a_change_shows_in_its_sequence_alone(lengths: list[int], axes: int, what: str) -> None:
    tokens, positions = build(lengths, axes, seed=1)
    before = hash_model_input(nest(tokens, positions))
    changed = (tokens if "token" in what else positions)[-1]
    if "exchanged" in what:
        changed[..., :2] = changed[..., :2].flip(-1)
    else:
        changed[..., 0] += 1
    assert (hash_model_input(nest(tokens, positions)) != before).tolist() == [False] * (len(lengths) - 1) + [True]
