"""A row's checksum ties mu to its tokens, to the bit, and to nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch

from recipe.offpolicy.micro_batch import row_checksums

TOKENS = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
MU = torch.tensor([[-0.5, -1.0, -1.5, 9.0], [-0.5, 9.0, -1.0, -2.0], [9.0, 9.0, 9.0, 9.0]])


def test_by_hand() -> None:
    def checksum(tokens: list[int], mu: list[float]) -> int:
        content = b"".join(token.to_bytes(8, "little") for token in tokens)
        content += b"torch.float32" + torch.tensor(mu).numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")

    # The third row has no response token and none of the checksums.
    assert row_checksums(TOKENS, MASK, MU) == [
        checksum([5, 6, 7], [-0.5, -1.0, -1.5]),
        checksum([5, 7, 8], [-0.5, -1, -2]),
    ]


def test_padding_is_not_read() -> None:
    wider = [torch.nn.functional.pad(t, (0, 3), value=v) for t, v in ((TOKENS, 7), (MASK, 0), (MU, -3.0))]
    assert row_checksums(*wider) == row_checksums(TOKENS, MASK.bool(), MU)
    assert row_checksums(TOKENS.int(), MASK, torch.where(MASK.bool(), MU, torch.nan)) == row_checksums(TOKENS, MASK, MU)


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens, mu: (tokens, mu.roll(1, -1)),
        lambda tokens, mu: (tokens, mu.flip(0)),
        lambda tokens, mu: (tokens.flip(0), mu),
        lambda tokens, mu: (tokens, mu.bfloat16()),
        lambda tokens, mu: (tokens, mu.double()),
        lambda tokens, mu: (tokens, torch.nextafter(mu, torch.zeros(()))),
        lambda tokens, mu: (tokens + 1, mu),
    ],
    ids=["mu shifted", "rows of mu permuted", "rows of tokens permuted", "cast down", "cast up", "one ulp", "tokens"],
)
def test_anything_else_changes_it(change: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1000, (6, 5), generator=generator)
    mu = -torch.rand(6, 5, generator=generator)
    mask = torch.ones(6, 5)
    changed_tokens, changed_mu = change(tokens, mu)
    before, after = row_checksums(tokens, mask, mu), row_checksums(changed_tokens, mask, changed_mu)
    assert len(before) == len(after) == 6
    assert set(before).isdisjoint(after)


def test_nothing_to_read() -> None:
    assert row_checksums(TOKENS, torch.zeros(3, 4), MU) == []
    assert row_checksums(TOKENS[:0], MASK[:0], MU[:0]) == []
