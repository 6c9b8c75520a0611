"""Seals: a per-row hash of each column that the loss reads, taken where the column is made and compared in the loss.

A seal travels as a column next to the column that it seals. It holds the hash and the mean of the row's values, so an
error can report the original mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..correction.deferred_value import DeferredValue
from ..correction.row_layout import detect_layout
from .checksums import hash_columns, hash_numbers

PREFIX = "offpolicy_seal_"
"""Prefix of a seal's key, before the key of its column."""
PLAN_HASH = "plan"
"""Name of the seal of the plan, which is the same for all rows."""


class LivenessError(RuntimeError):
    """A configured correction was not seen to act; the message says which, and what was seen instead."""


class SealError(LivenessError):
    """A column changed before it reached the loss; the message says which column and row, and both values."""


def key_of(column: str) -> str:
    """Return the key of a column's seal."""
    return f"{PREFIX}{column}"


def seal_columns(tokens: Tensor, mask: Tensor, columns: Sequence[Tensor]) -> list[Tensor]:
    """Seal per-token columns: (B, 3) int32 each, the hash in two halves and the bits of the mean.

    Values are sealed as float32, whatever their dtype in the batch.

    Args:
        tokens: (B, T) int64, or nested by row, like the other columns.
        mask: (B, T) bool or 0/1.
        columns: (B, T) each.
    """
    whole = [column.detach().float() for column in columns]
    return [*map(_join, hash_columns(tokens, mask, whole).unbind(-1), (_mean(column, mask) for column in whole))]


def seal_numbers(values: Tensor) -> Tensor:
    """Seal a per-row column, (B,) or (B, K): (B, 3) int32, with the mean of each row's numbers."""
    return _join(hash_numbers(values), values.detach().double().reshape(len(values), -1).mean(-1))


def build_seals(tokens: Tensor, mask: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Seal columns of the rows with these tokens, by name.

    Args:
        tokens, mask: "responses" and "response_mask", nested or padded.
        columns: per token in the same layout, or per row.
    """
    by_token = {name: column for name, column in columns.items() if column.is_nested or column.shape == mask.shape}
    sealed = dict(zip(by_token, seal_columns(tokens, mask, [*by_token.values()]), strict=True)) if by_token else {}
    return sealed | {name: seal_numbers(column) for name, column in columns.items() if name not in by_token}


def seal_constant(number: int, rows: int) -> Tensor:
    """Seal a 64-bit number that is the same for all rows: (B, 3) int32."""
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
    """Compare the loss's columns with their seals; the value raises ``SealError`` when it is fetched.

    Rows without a response token are skipped, because the loss reads none of their values.

    Args:
        seals: column -> (B, 3) int32.
        tokens, mask: (B, T).
        by_token: column -> (B, T).
        by_row: column -> (B,) or (B, K).
        plan: 64-bit hash of the plan that arrived.

    Raises:
        SealError: a sealed column is missing.
    """
    if absent := sorted(set(seals) - {*by_token, *by_row, PLAN_HASH}):
        raise SealError(f"{', '.join(absent)} did not reach the loss: sealed for these sequences, then lost.")
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
        return f"the plan of another update reached the loss with {count} of {rows} sequences of the micro-batch.{ends}"
    there = mask[row].bool()
    values = columns[name][row]
    values = values[there] if values.shape == there.shape else values.reshape(-1)
    ids = tokens[row][there][:4].tolist()
    return (
        f"{name} changed before it reached the loss, in {count} of {rows} sequences of the micro-batch. Sequence "
        f"{row}, whose response of {int(there.sum())} tokens begins with the ids {ids}: its mean was {was:.6g} at the "
        f"source and is {float(values.double().mean()):.6g} in the loss, beginning with "
        f"{[float(f'{value:.4g}') for value in values[:4].tolist()]}.{ends}"
    )
