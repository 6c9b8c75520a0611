"""Blocks of rows are the batch, piece by piece, and what is computed in them is as large as a block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

from recipe.offpolicy.batch.checksums import hash_rows
from recipe.offpolicy.correction.row_blocks import BLOCK, split_rows, split_tokens
from recipe.offpolicy.correction.row_layout import detect_layout
from tests.support.growth import count_work
from tests.support.packed import packed

LENGTHS = draw.lists(draw.integers(0, 5), min_size=1, max_size=12)


@given(LENGTHS, draw.integers(1, 12))
def test_blocks_of_nested_rows(lengths: list[int], most: int) -> None:
    """In order, each as large as it may be, and padded to its own longest row."""
    values = torch.arange(60).reshape(12, 5)[: len(lengths)]
    column = packed(values, lengths)
    blocks = list(split_rows({"one": column, "other": column + 100}, most))
    assert [row for rows, _ in blocks for row in range(rows.start, rows.stop)] == list(range(len(lengths)))
    assert torch.equal(torch.cat([block["one"].values() for _, block in blocks]), column.values())
    for (rows, block), following in zip(blocks, [*blocks[1:], None], strict=True):
        tokens = sum(lengths[rows])
        assert tokens <= most or rows.stop - rows.start == 1
        assert following is None or tokens + lengths[following[0].start] > most
        assert block["one"].to_padded_tensor(0).shape[1] == max(lengths[rows])
        assert torch.equal(block["other"].values(), block["one"].values() + 100)


@given(LENGTHS, draw.integers(1, 12))
def test_blocks_of_tokens_are_those_of_rows(lengths: list[int], most: int) -> None:
    column = packed(torch.arange(60).reshape(12, 5)[: len(lengths)], lengths)
    for given_column in (column, torch.arange(15).reshape(3, 5), column.values()[:0].reshape(0, 5)):
        expected = list(split_rows({"one": given_column}, most))
        blocks = list(split_tokens({"one": given_column}, most))
        assert len(blocks) == len(expected)
        for (at, rows, tokens), (same, block) in zip(blocks, expected, strict=True):
            layout = detect_layout(**block)
            assert at == same
            assert torch.equal(tokens["one"], layout.tokens(block["one"]))
            assert torch.equal(rows.sum(tokens["one"]), layout.sum(tokens["one"]))
            assert rows.count == layout.count


def test_blocks_of_padded_rows_share_their_memory() -> None:
    column = torch.zeros(5, 4)
    blocks = list(split_rows({"one": column}, most=9))
    assert [(rows.start, rows.stop) for rows, _ in blocks] == [(0, 2), (2, 4), (4, 5)]
    assert {block["one"].untyped_storage().data_ptr() for _, block in blocks} == {column.untyped_storage().data_ptr()}
    assert [rows for rows, _ in split_rows({"one": column[:0]})] == [slice(0, 0)]


def test_columns_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="not as long as"):
        list(split_rows({"one": packed(torch.zeros(2, 3), [3, 1]), "other": packed(torch.zeros(2, 3), [2, 2])}))


@pytest.mark.parametrize("nested", [True, False])
def test_a_larger_batch_is_hashed_in_the_same_memory(nested: bool) -> None:
    def peak(rows: int) -> int:
        ids = torch.arange(rows * 1024).reshape(rows, 1024)
        columns = ids, torch.ones_like(ids, dtype=torch.bool), -ids.float()
        if nested:
            columns = tuple(packed(column, [1024] * rows) for column in columns)
        return count_work(lambda: hash_rows(*columns)).peak

    in_a_block = BLOCK // 1024
    assert peak(8 * in_a_block) < 1.2 * peak(2 * in_a_block)


def test_nested_rows_have_the_hashes_of_padded_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, mu = torch.randint(99, (300, 70), generator=generator), -torch.rand(300, 70, generator=generator)
    lengths = torch.randint(0, 71, (300,), generator=generator)
    mask = (torch.arange(70) < lengths[:, None]) & (torch.rand(300, 70, generator=generator) < 0.7)
    nested = hash_rows(*(packed(column, lengths.tolist()) for column in (ids, mask, mu)))
    assert torch.equal(nested, hash_rows(ids, mask, mu))
    assert (nested[~mask.any(-1)] == 0).all()
