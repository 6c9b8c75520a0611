"""The tokens and rows that statistics are taken over, and how sums over them are formed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .catalogue import BUCKETS, STALENESS, TURNS
from .rows import Rows


@dataclass(frozen=True)
class Groups:
    """Groups of rows.

    Attributes:
        names: of each; "" holds all rows with a response token.
        members: (G, B) float64 of 0 and 1. A row of no valid token has no length.
    """

    names: tuple[str, ...]
    members: Tensor

    def sums(self, columns: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Group -> name of a column -> its sum over the rows of the group, 0-dim float64."""
        values = _matrix(list(columns.values()), self.members.shape[1])
        sums = iter((self.members @ values.T).flatten().unbind())
        return {group: {name: next(sums) for name in columns} for group in self.names}

    def with_signs(self, sums: Tensor, names: tuple[str, str]) -> Groups:
        """And the rows whose value in a column is above, and below, 0."""
        signs = _matrix([sums > 0, sums < 0], self.members.shape[1])
        return Groups((*self.names, *names), torch.cat((self.members, signs.double())))


@dataclass(frozen=True)
class Sample:
    """The tokens and rows that statistics are taken over; for tensors of tokens and columns see ``rows.Rows``.

    Attributes:
        rows: how tokens lie in rows.
        mask, valid: bool by token, response tokens, and those of them whose mu and pi_old are finite.
        valid_number, invalid_number: float64 by token, ``valid`` as 0 and 1, and its opposite.
        first: 0-dim int64, where the first valid token lies among all; None where there are no tokens at all.
        tokens, length: columns, float64, response tokens and valid tokens of each row.
        rows_with_length: column, float64 of 0 and 1, rows with a valid token.
        count: 0-dim float64, valid tokens.
        groups: of rows.
        turns: group of tokens -> float64 of 0 and 1 by token, within ``mask``; empty without segment ids.
        staleness: column, float64, or None.
    """

    rows: Rows
    mask: Tensor
    valid: Tensor
    valid_number: Tensor
    invalid_number: Tensor
    first: Tensor | None
    tokens: Tensor
    length: Tensor
    rows_with_length: Tensor
    count: Tensor
    groups: Groups
    turns: dict[str, Tensor]
    staleness: Tensor | None

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Least and greatest of the valid tokens' values, 0-dim; 0 where there is none.

        Args:
            values: float64 by token, 0 off ``valid``.
        """
        if self.first is None:
            nothing = values.new_zeros(())
            return nothing, nothing
        # What fills the places that do not count is one of the values that do.
        filling = values.take(self.first).nan_to_num()
        return torch.addcmul(values, self.invalid_number, filling).aminmax()


@torch.no_grad()
def sample_of(rows: Rows, mask: Tensor, valid: Tensor, segment_ids: Tensor | None, staleness: Tensor | None) -> Sample:
    """Sort tokens and rows into the groups that statistics are given by; see ``stages.rollout_stage``."""
    valid_number = number(valid)
    tokens, length = rows.sum(mask), rows.sum(valid_number)
    age = None if staleness is None else rows.column(staleness.detach().double())
    turns = {}
    if segment_ids is not None:
        unseen = torch.iinfo(segment_ids.dtype).max
        ids = torch.where(mask, segment_ids, unseen)
        first = mask & (ids == rows.beside(rows.least(ids)))
        turns = dict(zip(TURNS, (number(first), number(mask & ~first)), strict=True))
    return Sample(
        rows=rows,
        mask=mask,
        valid=valid,
        valid_number=valid_number,
        invalid_number=1 - valid_number,
        first=valid.view(torch.uint8).argmax() if valid.numel() else None,
        tokens=tokens,
        length=length,
        rows_with_length=(length > 0).double(),
        count=length.sum(),
        groups=_groups(rows.count, tokens, length, age),
        turns=turns,
        staleness=age,
    )


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Sum of products, over all places."""
    return torch.dot(one.flatten(), other.flatten())


def number(mask: Tensor) -> Tensor:
    """0 and 1 in float64: faster by way of bytes than straight from bool on CPU."""
    return mask.view(torch.uint8).double()


def square_sum(values: Tensor) -> Tensor:
    """Sum of squares, over all places."""
    flat = values.flatten()
    return torch.dot(flat, flat)


def _groups(rows: int, tokens: Tensor, length: Tensor, age: Tensor | None) -> Groups:
    names, members = [""], [tokens > 0]
    if age is not None:
        for index, name in enumerate(STALENESS):
            names.append(f"staleness/{name}")
            members.append(age >= index if name.startswith("ge") else age == index)
    others = len(members)
    names += [f"length/{name}" for name in BUCKETS]
    # Rows above each bound, of which those above the next belong to a later bucket.
    members += [length > most for most in (0, *(most for most in BUCKETS.values() if most is not None))]
    number = _matrix(members, rows).double()
    number[others:-1] -= number[others + 1 :].clone()
    return Groups(tuple(names), number)


def _matrix(columns: list[Tensor], rows: int) -> Tensor:
    """(len(columns), rows)."""
    return torch.cat(columns).reshape(len(columns), rows)
