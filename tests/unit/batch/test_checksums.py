"""A row's checksum ties mu to its tokens, to the bit, and to nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as draw

from recipe.offpolicy.batch.seals import compute_row_checksums
from tests.support.drawn import examples

TOKENS = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
MU = torch.tensor([[-0.5, -1.0, -1.5, 9.0], [-0.5, 9.0, -1.0, -2.0], [9.0, 9.0, 9.0, 9.0]])
FLOAT32 = 0x13198A2E03707344
"""The seed of float32."""

FLOATS = draw.floats(-50.0, 0.0, width=32)
ROWS = draw.lists(draw.tuples(draw.integers(0, 200_000), FLOATS), min_size=2, max_size=12)


def mix(value: int) -> int:
    """SplitMix64's finaliser on an unsigned integer."""
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


def one(row: list[tuple[int, float]], dtype: torch.dtype = torch.float32) -> int:
    tokens, mu = (list(column) for column in zip(*row, strict=True))
    (found,) = compute_row_checksums(torch.tensor([tokens]), torch.ones(1, len(row)), torch.tensor([mu]).to(dtype))
    return found


def test_by_hand() -> None:
    # The finaliser's own known answer, and a third row that has no response token and no checksum.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert compute_row_checksums(TOKENS, MASK, MU) == [
        checksum([5, 6, 7], [-0.5, -1.0, -1.5]),
        checksum([5, 7, 8], [-0.5, -1.0, -2.0]),
    ]


@examples
@given(ROWS, draw.integers(0, 11), FLOATS, draw.integers(0, 200_000))
def test_one_replaced_value_or_token_shows(row: list[tuple[int, float]], at: int, mu: float, token: int) -> None:
    at %= len(row)
    for there in ((row[at][0], mu), (token, row[at][1])):
        changed = [*row[:at], there, *row[at + 1 :]]
        assert (one(row) == one(changed)) == (repr(row) == repr(changed))
