"""Hashes of rows, and comparison of the rows that were seen with those that were sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from recipe.offpolicy.batch.seals import compute_row_checksums, find_difference, hash_model_input

TOKENS = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
MU = torch.tensor([[-0.5, -1.0, -1.5, 9.0], [-0.5, 9.0, -1.0, -2.0], [9.0, 9.0, 9.0, 9.0]])
FLOAT32 = 0x13198A2E03707344
"""The seed for float32."""


def mix(value: int) -> int:
    """SplitMix64's finaliser, applied to an unsigned integer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def checksum(tokens: list[int], mu: list[float]) -> int:
    bits = torch.tensor(mu).view(torch.int32).tolist()
    total = 0
    for place, (token, bit) in enumerate(zip(tokens, bits, strict=True), start=1):
        total += mix((mix((place << 32) + token) + FLOAT32 + bit) % 2**64)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


def test_by_hand() -> None:
    # The finaliser's own known answer, and a third row that has no response token and no checksum.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert compute_row_checksums(TOKENS, MASK, MU) == [
        checksum([5, 6, 7], [-0.5, -1.0, -1.5]),
        checksum([5, 7, 8], [-0.5, -1.0, -2.0]),
    ]


SENT = {"a": 3, "b": 5, "c": 5, "d": 7}
OLD = {"d": "too old", "x": "elsewhere"}


@pytest.mark.parametrize(
    ("seen", "left", "epochs"), [([5, 3, 7, 5], {}, 1), ([3, 5, 5], OLD, 1), ([3, 5, 5, 5, 3, 5], OLD, 2)]
)
def test_exactly_the_rows_that_have_not_left(seen: list[int], left: dict[str, str], epochs: int) -> None:
    assert find_difference(SENT, seen, left, epochs) is None


@pytest.mark.parametrize(
    ("seen", "epochs", "said"),
    [
        ([3, 5], 1, "3 of 4 rows expected (1 left: too old), 2 seen: 2 missing or changed (b, c)"),
        ([3, 5, 5, 7], 1, "3 of 4 rows expected (1 left: too old), 4 seen: 1 had left (d)"),
        ([3, 3, 5, 5], 1, "3 of 4 rows expected (1 left: too old), 4 seen: 1 too often (a)"),
        ([3, 5, 5], 2, "3 of 4 rows expected (1 left: too old), 2 epochs, 3 seen: 3 missing or changed (a, b, c)"),
        (
            [4, 5, 5],
            1,
            "3 of 4 rows expected (1 left: too old), 3 seen: 1 missing or changed (a), 1 were not sent with this "
            "content",
        ),
    ],
)
def test_what_differs_is_named_by_row(seen: list[int], epochs: int, said: str) -> None:
    assert find_difference(SENT, seen, OLD, epochs) == said


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def build(lengths: list[int], axes: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Build tokens (L,) and positions (L,), or (axes, L), for each sequence."""
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
