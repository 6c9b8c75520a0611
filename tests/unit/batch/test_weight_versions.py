"""The version of the weights that sampled each token: chunks are assigned to runs of the response mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from recipe.offpolicy.batch.weight_versions import (
    CHUNKS,
    UNKNOWN,
    VERSIONS,
    RowVersions,
    TokenVersions,
    compute_token_versions,
    lay_out,
    read_row_versions,
    read_versions,
)

MIXED = torch.tensor([UNKNOWN])


def laid(turns: Any, mask: list[int], by_row: Tensor = MIXED) -> list[int]:
    """The versions of one padded row."""
    (found,) = lay_out([turns], torch.tensor([mask]), by_row).tolist()
    return found


KNOWN: dict[str, tuple[Any, list[int], list[int]]] = {
    "no token": ([], [0, 0], [-1, -1]),
    "a row that was masked": ([[(3, 2)]], [0, 0], [-1, -1]),
    "a turn without chunks behind all runs": ([[(3, 2)], []], [1, 1], [3, 3]),
    "a chunk of no token": ([[(3, 0), (4, 2), (5, 0)]], [1, 1], [4, 4]),
}
UNFIT: dict[str, tuple[Any, list[int]]] = {
    "a run longer than its chunks": ([[(3, 2)]], [1, 1, 1]),
    "the next turn's chunks are no one else's": ([[(3, 1)], [(4, 3)]], [1, 1, 0, 1]),
    "more runs than turns": ([[(3, 4)]], [1, 1, 0, 1]),
    "two turns in one run": ([[(3, 2)], [(4, 2)]], [1, 1, 1, 1]),
    "versions that fall": ([[(4, 2), (3, 2)]], [1, 1, 1, 1]),
    "versions that fall from turn to turn": ([[(4, 1)], [(3, 1)]], [1, 0, 1]),
    "a turn without chunks before another": ([[], [(3, 2)]], [1, 0, 1]),
    "a turn of no token behind all runs": ([[(3, 2)], [(3, 0)]], [1, 1]),
}


@pytest.mark.parametrize("case", KNOWN)
def test_each_token_has_the_version_of_its_chunk(case: str) -> None:
    turns, mask, expected = KNOWN[case]
    assert laid(turns, mask) == expected


@pytest.mark.parametrize("case", UNFIT)
def test_a_row_whose_chunks_do_not_fit_is_unknown_whatever_its_row_says(case: str) -> None:
    turns, mask = UNFIT[case]
    assert laid(turns, mask, torch.tensor([3])) == [UNKNOWN] * len(mask)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[list[tuple[int, int]]], list[int], list[int]]:
    """Draw turns of one to four chunks, separated by tool outputs, the last one truncated; return turns, mask and
    expected versions.
    """
    version, turns, mask, expected = 0, [], [], []
    for _ in range(draw(st.integers(1, 4))):
        gap = [0] * draw(st.integers(int(bool(turns)), 3))
        mask, expected = mask + gap, expected + [UNKNOWN] * len(gap)
        chunks = []
        for _ in range(draw(st.integers(1, 4))):
            version += draw(st.integers(0, 3))
            chunks.append((version, draw(st.integers(1, 5))))
        run = [each for each, tokens in chunks for _ in range(tokens)]
        run = run[: draw(st.integers(1, len(run)))]
        turns.append(chunks)
        mask, expected = mask + [1] * len(run), expected + run
    return turns, mask, expected


@given(st.lists(rows(), min_size=1, max_size=4), st.integers(0, 3))
def test_drawn_rows(drawn: list[Any], padding: int) -> None:
    """Per-token versions cover exactly the response, and never decrease within a row."""
    width = max(len(mask) for _, mask, _ in drawn) + padding
    masks = torch.tensor([mask + [0] * (width - len(mask)) for _, mask, _ in drawn])
    turns_of_rows, none = [turns for turns, _, _ in drawn], torch.full((len(drawn),), UNKNOWN)
    found = lay_out(turns_of_rows, masks, none)
    packed = torch.nested.as_nested_tensor([torch.tensor(mask) for _, mask, _ in drawn], layout=torch.jagged)
    assert [row.tolist() for row in lay_out(turns_of_rows, packed, none).unbind()] == [row for _, _, row in drawn]
    for (turns, mask, expected), row in zip(drawn, found.tolist(), strict=True):
        assert row == expected + [UNKNOWN] * (width - len(mask))
        tokens = [version for version in row if version != UNKNOWN]
        assert len(tokens) == sum(mask) <= sum(n for turn in turns for _, n in turn)
        assert tokens == sorted(tokens)


def batch(*fields: dict[str, Any]) -> TensorDict:
    return TensorDict({"extra_fields": NonTensorStack(*fields)}, batch_size=len(fields))


def field(oldest: int, newest: int, turns: Any = None) -> dict[str, Any]:
    span = {"min_global_steps": oldest, "max_global_steps": newest}
    return span if turns is None else span | {CHUNKS: turns}


MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]], dtype=torch.bool)


def test_versions_are_by_row_where_no_row_notes_chunks() -> None:
    found = read_versions(batch(field(3, 3), field(3, 4), field(4, 4)), MASK)
    assert type(found) is RowVersions
    assert found.compute_ages(6, MASK).tolist() == [2, 2, 1]
    assert found.find_unknown(MASK).tolist() == [False, True, False]
    assert read_versions(TensorDict({}, batch_size=3), MASK) is None


def test_a_row_of_one_version_has_it_whatever_rows_stand_beside_it() -> None:
    """Its chunks may be too short, because verl names one version. If a chunk names another version, the row has
    several versions.
    """

    def tokens(*fields: dict[str, Any], mask: Tensor = MASK) -> list[list[int]]:
        found = read_versions(batch(*fields), mask)
        assert isinstance(found, TokenVersions)
        return [row.tolist() for row in found.tokens.unbind()]

    short = field(2, 2, [[(2, 1)]])
    assert tokens(short, field(3, 3, [[(3, 3)]]), field(3, 4)) == [[2, 2, 2], [3, 3, -1], [-1, -1, -1]]
    assert tokens(short, field(3, 4, [[(3, 1), (4, 1)]]), field(3, 4)) == [[2, 2, 2], [3, 4, -1], [-1, -1, -1]]
    of_two = field(2, 2, [[(2, 1), (3, 2)]])
    assert tokens(of_two, field(3, 3), field(4, 4)) == [[2, 3, 3], [3, 3, -1], [4, 4, -1]]
    nested = torch.nested.nested_tensor([row[row] for row in MASK], layout=torch.jagged)
    packed = tokens(short, field(3, 3, [[(3, 3)]]), field(4, 4), mask=nested)
    assert packed == [[2, 2, 2], [3, 3], [4, 4]]


def test_a_row_of_two_versions_has_none_by_token() -> None:
    versions = read_row_versions(TensorDict({VERSIONS: torch.tensor([[4, 5], [7, 7]])}, batch_size=[2]), [])
    with pytest.raises(ValueError, match="1 sequences were sampled by several versions"):
        compute_token_versions(versions, torch.ones(2, 3))
    with pytest.raises(ValueError, match="verl does not record the version"):
        compute_token_versions(None, torch.ones(2, 3))
