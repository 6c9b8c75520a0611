"""Blocks of rows are the batch, piece by piece, and what is computed in them is as large as a block."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as draw

from recipe.offpolicy.batch.seals import hash_rows
from recipe.offpolicy.correction.row_layout import detect_layout, split_tokens
from tests.support.packed import packed

LENGTHS = draw.lists(draw.integers(0, 5), min_size=1, max_size=12)


@given(LENGTHS, draw.integers(1, 12))
def test_blocks_of_nested_rows(lengths: list[int], most: int) -> None:
    """In order, each as large as it may be, and with its own rows."""
    values = torch.arange(60).reshape(12, 5)[: len(lengths)]
    column = packed(values, lengths)
    blocks = list(split_tokens({"one": column, "other": column + 100}, most))
    assert [row for at, _, _ in blocks for row in range(at.start, at.stop)] == list(range(len(lengths)))
    assert torch.equal(torch.cat([tokens["one"] for _, _, tokens in blocks]), column.values())
    of_rows = torch.cat([rows.sum(tokens["one"]) for _, rows, tokens in blocks])
    assert torch.equal(of_rows, detect_layout(column=column).sum(column.values()))
    for (at, rows, tokens), following in zip(blocks, [*blocks[1:], None], strict=True):
        number = len(tokens["one"])
        assert (rows.count, number) == (at.stop - at.start, sum(lengths[at]))
        assert number <= most or rows.count == 1
        assert following is None or number + lengths[following[0].start] > most
        assert torch.equal(tokens["other"], tokens["one"] + 100)


def test_blocks_of_padded_rows_share_their_memory() -> None:
    column = torch.arange(20).reshape(5, 4)
    blocks = list(split_tokens({"one": column}, most=9))
    assert [(at.start, at.stop) for at, _, _ in blocks] == [(0, 2), (2, 4), (4, 5)]
    assert torch.equal(torch.cat([rows.sum(tokens["one"]) for _, rows, tokens in blocks]), column.double().sum(1, True))
    here = {tokens["one"].untyped_storage().data_ptr() for _, _, tokens in blocks}
    assert here == {column.untyped_storage().data_ptr()}
    assert [at for at, _, _ in split_tokens({"one": column[:0]})] == [slice(0, 0)]


def test_nested_rows_have_the_hashes_of_padded_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, mu = torch.randint(99, (300, 70), generator=generator), -torch.rand(300, 70, generator=generator)
    lengths = torch.randint(0, 71, (300,), generator=generator)
    mask = (torch.arange(70) < lengths[:, None]) & (torch.rand(300, 70, generator=generator) < 0.7)
    nested = hash_rows(*(packed(column, lengths.tolist()) for column in (ids, mask, mu)))
    assert torch.equal(nested, hash_rows(ids, mask, mu))
    assert (nested[~mask.any(-1)] == 0).all()
