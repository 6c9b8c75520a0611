"""Tokens and rows over which statistics are computed, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .row_layout import RowLayout
from .statistics import BUCKETS, STALENESS, TURNS


@dataclass(frozen=True)
class RowGroups:
    """Groups of rows over which statistics are computed.

    Attributes:
        names: names of the groups; the group "" contains all rows with a response token.
        members: (G, B) float64 of 0 and 1. A row without a valid token does not belong to any length group.
    """

    names: tuple[str, ...]
    members: Tensor

    def sum_columns(self, columns: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Sum columns by group; returns group -> column name -> sum over the rows of the group, 0-dim float64."""
        values = _matrix(list(columns.values()), self.members.shape[1])
        sums = iter((self.members @ values.T).flatten().unbind())
        return {group: {name: next(sums) for name in columns} for group in self.names}

    def add_signs(self, sums: Tensor, names: tuple[str, str]) -> RowGroups:
        """Add two groups: the rows with a positive value in a column, and the rows with a negative value."""
        signs = _matrix([sums > 0, sums < 0], self.members.shape[1])
        return RowGroups((*self.names, *names), torch.cat((self.members, signs.double())))


@dataclass(frozen=True)
class TokenSample:
    """Tokens and rows for statistics; for "tensor of tokens" and "column" see ``row_layout.RowLayout``.

    Attributes:
        rows: layout of the tokens.
        mask, valid: bool per token: response tokens, and response tokens whose mu and pi_old are finite.
        valid_number, invalid_number: float64 per token, ``valid`` as 0 and 1, and its complement.
        first: 0-dim int64, index of the first valid token among all tokens; None if there are no tokens.
        tokens, length: columns, float64, number of response tokens and of valid tokens in each row.
        rows_with_length: column, float64, 1 for rows with a valid token, else 0.
        count: 0-dim float64, number of valid tokens.
        groups: groups of rows.
        turns: (len(TURNS), total tokens) float64 of 0 and 1, the tokens of each group within ``mask``; None without
            segment ids.
        staleness: column or tensor of tokens, float64, or None.
        ages: (len(STALENESS), total tokens), like ``turns``; None unless staleness is per token.
    """

    rows: RowLayout
    mask: Tensor
    valid: Tensor
    valid_number: Tensor
    invalid_number: Tensor
    first: Tensor | None
    tokens: Tensor
    length: Tensor
    rows_with_length: Tensor
    count: Tensor
    groups: RowGroups
    turns: Tensor | None
    staleness: Tensor | None
    ages: Tensor | None

    def min_and_max(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the least and greatest value of the valid tokens, 0-dim; meaningless if there are none.

        Args:
            values: float64 per token, 0 outside ``valid``.
        """
        if self.first is None:
            return values.new_zeros(()), values.new_zeros(())
        # Tokens that are not valid are filled with the value of a valid token.
        return torch.addcmul(values, self.invalid_number, values.take(self.first)).aminmax()

    def sum_by_turn(self, *columns: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Sum tensors of tokens by turn group, 0-dim float64; empty without segment ids.

        Args:
            columns: float64 per token.
        """
        return _sum_by_group(TURNS, self.turns, columns)

    def sum_by_age(self, *columns: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Sum tensors of tokens by age group, 0-dim float64; empty unless staleness is per token."""
        return _sum_by_group(STALENESS, self.ages, columns)


@torch.no_grad()
def build_sample(
    rows: RowLayout, mask: Tensor, valid: Tensor, segment_ids: Tensor | None, staleness: Tensor | None
) -> TokenSample:
    """Group tokens and rows for statistics; see ``stages.rollout_stage``.

    Example:
        >>> from .row_layout import detect_layout
        >>> mask = torch.tensor([[True, True, True], [True, False, False]])
        >>> sample = build_sample(detect_layout(mask=mask), mask, mask, None, None)
        >>> sample.count.item(), sample.length.flatten().tolist()
        (4.0, [3.0, 1.0])
    """
    valid_number = to_float64(valid)
    tokens, length = rows.sum(mask), rows.sum(valid_number)
    age, ages, turns = None, None, None
    if staleness is not None and staleness.dim() == 2:
        age = rows.tokens(staleness).detach().double()
        group = age.clamp(max=len(STALENESS) - 1).flatten()
        ages = to_float64((group == torch.arange(len(STALENESS), device=group.device)[:, None]) & mask.flatten())
    elif staleness is not None:
        age = rows.to_column(staleness.detach().double())
    if segment_ids is not None:
        unseen = torch.iinfo(segment_ids.dtype).max
        ids = torch.where(mask, segment_ids, unseen)
        first = mask & (ids == rows.broadcast(rows.min(ids)))
        turns = to_float64(torch.stack((first.flatten(), (mask & ~first).flatten())))
    return TokenSample(
        rows=rows,
        mask=mask,
        valid=valid,
        valid_number=valid_number,
        invalid_number=1 - valid_number,
        # argmax returns the first of equal elements.
        first=valid.view(torch.uint8).argmax() if valid.numel() else None,
        tokens=tokens,
        length=length,
        rows_with_length=(length > 0).double(),
        count=length.sum(),
        groups=_groups(rows.count, tokens, length, age if ages is None else None),
        turns=turns,
        staleness=age,
        ages=ages,
    )


def to_float64(mask: Tensor) -> Tensor:
    """Convert bool to 0 and 1 in float64; on CPU, converting through bytes is faster than directly from bool.

    Example:
        >>> to_float64(torch.tensor([True, False])).tolist()
        [1.0, 0.0]
    """
    return mask.view(torch.uint8).double()


def _sum_by_group(
    names: Iterable[str], members: Tensor | None, columns: Sequence[Tensor]
) -> dict[str, tuple[Tensor, ...]]:
    if members is None:
        return {}
    # The sums are taken column by column, because a concatenation would need as much memory as all columns together.
    sums = [(members @ column.flatten()).unbind() for column in columns]
    return dict(zip(names, zip(*sums, strict=True), strict=True))


def _groups(rows: int, tokens: Tensor, length: Tensor, age: Tensor | None) -> RowGroups:
    names, column, bound, less_the_next = _thresholds(age is not None, tokens.device)
    columns = [tokens, length] if age is None else [tokens, length, age]
    above = _matrix(columns, rows).index_select(0, column) > bound
    return RowGroups(names, less_the_next @ above.double())


@cache
def _thresholds(with_age: bool, device: torch.device) -> tuple[tuple[str, ...], Tensor, Tensor, Tensor]:
    """Build the thresholds that sort rows into groups: a row is in the group of the last bound that it exceeds.

    Returns:
        Four values: the names of the G groups; (G,) int64, which number of a row each group compares (0 tokens, 1
            length, 2 age); the bounds, (G, 1) float64; and a (G, G) float64 matrix that removes from each group the
            rows above the next bound on the same number.
    """
    lengths = (0, *(most for most in BUCKETS.values() if most is not None))
    of_column = [{"": 0}, dict(zip((f"length/{name}" for name in BUCKETS), lengths, strict=True))]
    if with_age:
        of_column.append({f"staleness/{name}": age - 1 for age, name in enumerate(STALENESS)})
    found = [(name, column, bound) for column, groups in enumerate(of_column) for name, bound in groups.items()]
    names, columns, bounds = zip(*found, strict=True)
    less = torch.eye(len(found), dtype=torch.float64)
    for this, following in enumerate(range(1, len(found))):
        less[this, following] = -float(columns[this] == columns[following])
    bound = torch.tensor(bounds, dtype=torch.float64, device=device)[:, None]
    return names, torch.tensor(columns, device=device), bound, less.to(device)


def _matrix(columns: list[Tensor], rows: int) -> Tensor:
    """Stack the columns: (len(columns), rows)."""
    return torch.cat(columns).reshape(len(columns), rows)
