"""Seals: a hash by row of each column that the loss reads, taken where the column is made and compared in the loss.

A seal travels as a column next to its own. It holds the hash, and the mean of the row's values, by which an error can
say what was there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..correction.deferred_value import DeferredValue
from ..correction.row_layout import detect_layout
from .checksums import hash_columns, hash_numbers

PREFIX = "offpolicy_seal_"
"""Of the key of a seal, in front of its column's."""
PLAN_HASH = "plan"
"""Of what is sealed: the plan, which is one for all rows."""


class LivenessError(RuntimeError):
    """A configured correction was not seen to act; the message says which, and what was seen instead."""


class SealError(LivenessError):
    """What reached the loss is not what was made for it; the message says which column and row, and both values."""


def key_of(column: str) -> str:
    """Return the key of a column's seal."""
    return f"{PREFIX}{column}"


def seal_columns(tokens: Tensor, mask: Tensor, columns: Sequence[Tensor]) -> list[Tensor]:
    """Seal columns by token: (B, 3) int32 each, the hash in two halves and the bits of the mean.

    Values are sealed as float32, whatever dtype they travel in.

    Args:
        tokens: (B, T) int64, or nested by row, as the others.
        mask: (B, T) bool or 0/1.
        columns: (B, T) each.
    """
    whole = [column.detach().float() for column in columns]
    return [*map(_join, hash_columns(tokens, mask, whole).unbind(-1), (_mean(column, mask) for column in whole))]


def seal_numbers(values: Tensor) -> Tensor:
    """Seal a column by row, (B,) or (B, K): (B, 3) int32, with the mean of each row's numbers."""
    return _join(hash_numbers(values), values.detach().double().reshape(len(values), -1).mean(-1))


def build_seals(tokens: Tensor, mask: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Seal columns of the rows with these tokens, each by its name.

    Args:
        tokens, mask: "responses" and "response_mask", nested or padded.
        columns: by token in their layout, or by row.
    """
    by_token = {name: column for name, column in columns.items() if column.is_nested or column.shape == mask.shape}
    sealed = dict(zip(by_token, seal_columns(tokens, mask, [*by_token.values()]), strict=True)) if by_token else {}
    return sealed | {name: seal_numbers(column) for name, column in columns.items() if name not in by_token}


def seal_constant(number: int, rows: int) -> Tensor:
    """Seal what is the same for all rows by a 64-bit number: (B, 3) int32."""
    return _join(torch.full((rows,), number, dtype=torch.int64), torch.zeros(rows))


def _join(hashes: Tensor, means: Tensor) -> Tensor:
    halves = hashes.contiguous().view(torch.int32).reshape(-1, 2)
    return torch.cat([halves, means.float().view(torch.int32)[:, None]], dim=-1)


def _mean(column: Tensor, mask: Tensor) -> Tensor:
    rows = detect_layout(column=column, mask=mask)
    there = rows.tokens(mask).bool()
    total = rows.sum(torch.where(there, rows.tokens(column), 0.0))
    return (total / rows.sum(there)).flatten()


def compare(
    seals: Mapping[str, Tensor],
    *,
    tokens: Tensor,
    mask: Tensor,
    by_token: Mapping[str, Tensor],
    by_row: Mapping[str, Tensor],
    plan: int,
) -> DeferredValue[None]:
    """Compare what the loss reads with its seals; the value raises ``SealError`` when it is fetched.

    Rows without a response token are left out, since nothing of them is read.

    Args:
        seals: column -> (B, 3) int32.
        tokens, mask: (B, T).
        by_token: column -> (B, T).
        by_row: column -> (B,) or (B, K).
        plan: 64-bit hash of the plan that came.

    Raises:
        SealError: a column that was sealed did not come.
    """
    if absent := sorted(set(seals) - {*by_token, *by_row, PLAN_HASH}):
        raise SealError(f"{', '.join(absent)} did not reach the loss: made for these rows, and lost on the way.")
    found = dict(zip(by_token, hash_columns(tokens, mask, [*map(_plain, by_token.values())]).unbind(-1), strict=True))
    found |= {name: hash_numbers(values) for name, values in by_row.items()}
    found[PLAN_HASH] = torch.full_like(next(iter(found.values())), plan)
    names = [name for name in found if name in seals]
    sealed = torch.stack([seals[name].to(mask.device) for name in names])
    hashes = sealed[..., :2].contiguous().view(torch.int64)[..., 0]
    broken = (torch.stack([found[name] for name in names]) != hashes) & mask.any(-1)

    def judge(counts: list[int]) -> None:
        if not any(counts):
            return
        at = next(i for i, count in enumerate(counts) if count)
        row = int(broken[at].nonzero()[0])
        was = float(sealed[at, row, 2].cpu().view(torch.float32))
        raise SealError(_describe(names[at], row, counts[at], len(mask), was, {**by_token, **by_row}, tokens, mask))

    return DeferredValue(broken.sum(-1), judge)


def _plain(column: Tensor) -> Tensor:
    return column.detach().float()


def _describe(
    name: str,
    row: int,
    count: int,
    rows: int,
    was: float,
    columns: Mapping[str, Tensor],
    tokens: Tensor,
    mask: Tensor,
) -> str:
    ends = " The optimizer has not stepped."
    if name == PLAN_HASH:
        return f"the plan of another update reached the loss with {count} of {rows} rows of the micro-batch.{ends}"
    there = mask[row].bool()
    values = columns[name][row]
    values = values[there] if values.shape == there.shape else values.reshape(-1)
    ids = tokens[row][there][:4].tolist()
    return (
        f"{name} changed between where it was made and the loss, in {count} of {rows} rows of the micro-batch. Row "
        f"{row}, whose response of {int(there.sum())} tokens begins with the ids {ids}: a mean of {was:.6g} was made, "
        f"and the loss has {float(values.double().mean()):.6g}, beginning with "
        f"{[float(f'{value:.4g}') for value in values[:4].tolist()]}.{ends}"
    )
