"""Seals: per-row hashes of the columns that the loss reads, computed at the columns' source and checked in the loss.

The hash is the sum over a row's tokens of mix(mix(2^32 place + token) + seed + bits of the value), where place is the
number of response tokens in the row up to this token, and the seed depends on the dtype. ``mix`` is the finaliser of
SplitMix64 (Steele, Lea, Flood 2014, Fast Splittable Pseudorandom Number Generators), a bijection of 64 bits, in
wrapping int64. The hash protects against mistakes, not against deliberate collisions.

A seal is sent as a column next to the column that it seals. It contains the hash and the mean of the row's values, so
that an error can report the original mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ..correction.row_layout import PackedRows, RowLayout, detect_layout, split_tokens
from ..correction.statistics import DeferredValue, fetch
from .padding import values_of

_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype with as many bytes as a float of each dtype."""
_SEEDS: Final = {
    torch.float64: 0x243F6A8885A308D3,
    torch.float32: 0x13198A2E03707344,
    torch.bfloat16: 0x24093822299F31D0,
    torch.float16: 0x082EFA98EC4E6C89,
}
_FIRST: Final = 0xBF58476D1CE4E5B9 - 2**64
_SECOND: Final = 0x94D049BB133111EB - 2**64


@torch.no_grad()
def hash_rows(tokens: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Hash each row's tokens and values where the mask is true, (B,) int64; a row without such a token has hash 0.

    The hash changes if any token, any bit of a value, the order of tokens or values, or the dtype of the values
    changes.

    Args:
        tokens: (B, T) integers, or nested by row, like the other columns.
        mask: (B, T) bool or 0/1.
        values: (B, T) of the float dtypes that training uses.

    Raises:
        KeyError: the dtype of the values is not supported.
        ValueError: layouts or shapes differ.
    """
    return hash_columns(tokens, mask, [values])[:, 0]


@torch.no_grad()
def hash_columns(tokens: Tensor, mask: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Hash each of several columns like ``hash_rows``: (B, C) int64.

    Args:
        tokens, mask: as in ``hash_rows``.
        columns: (B, T) each, of one dtype, or nested by row.
    """
    given = {"tokens": tokens, "mask": mask} | {str(i): column.detach() for i, column in enumerate(columns)}
    blocks = ((rows, block.pop("tokens"), block.pop("mask"), block) for _, rows, block in split_tokens(given))
    return torch.cat([hash_block(rows, ids, there, torch.stack([*of.values()])) for rows, ids, there, of in blocks])


def hash_block(rows: RowLayout, tokens: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Hash the rows of one block: (B, C) int64 from ``values`` of shape (C, *tokens.shape)."""
    there = mask.bool()
    at = _mix((rows.cumulative_count(there) << 32).bitwise_or_(tokens)).add_(_SEEDS[values.dtype])
    mixed = _mix(at + values.view(_BITS[values.element_size()])).mul_(there)
    if not isinstance(rows, PackedRows):
        return mixed.sum(-1).T
    # A row's sum is the cumulative sum at its end minus the cumulative sum at its start. Both wrap around, and so does
    # their difference.
    up_to = torch.cat((mixed.new_zeros(len(mixed), 1), mixed.cumsum(-1)), dim=-1)
    return up_to[:, rows.offsets].diff().T


@torch.no_grad()
def hash_numbers(values: Tensor) -> Tensor:
    """Hash each row's numbers in order, (B,) int64, from ``values`` of shape (B,) or (B, K) and any dtype."""
    numbers = values.detach().reshape(len(values), -1)
    bits = numbers.view(_BITS[numbers.element_size()]) if numbers.is_floating_point() else numbers
    found = torch.zeros(len(numbers), dtype=torch.int64, device=numbers.device)
    for column in bits.long().unbind(-1):
        found = _mix(found + column + _FIRST)
    return found


def _mix(value: Tensor) -> Tensor:
    """Mix the bits in place; additional memory is needed only for temporaries."""
    value ^= _shifted(value, 30)
    value *= _FIRST
    value ^= _shifted(value, 27)
    value *= _SECOND
    value ^= _shifted(value, 31)
    return value


def _shifted(value: Tensor, by: int) -> Tensor:
    """Logical right shift, which fills with zeros; torch's own shift repeats the sign bit."""
    return (value >> by).bitwise_and_((1 << (64 - by)) - 1)


PREFIX = "offpolicy_seal_"
"""Prefix of a seal's key, before the key of its column."""
PLAN_HASH = "plan"
"""Name of the seal that covers the plan, which is the same for all rows."""
INPUT = "model_input"
"""Name of the seal that covers the model's input, for which only the hash is stored."""


class LivenessError(RuntimeError):
    """A configured correction has no proven effect; the message names the correction and what was found instead."""


class SealError(LivenessError):
    """A column changed before it reached the loss; the message names the column and the row, and states both values."""


_END = " The optimizer has not stepped."


def key_of(column: str) -> str:
    """Return the key of a column's seal."""
    return f"{PREFIX}{column}"


def seal_columns(tokens: Tensor, mask: Tensor, columns: Sequence[Tensor]) -> list[Tensor]:
    """Compute the seals of per-token columns, (B, 3) int32 each: the hash in two halves, and the bits of the mean.

    Values are converted to float32 before they are sealed, regardless of their dtype in the batch.

    Args:
        tokens: (B, T) int64, or nested by row, like the other columns.
        mask: (B, T) bool or 0/1.
        columns: (B, T) each.
    """
    whole = [column.detach().float() for column in columns]
    return [*map(_join, hash_columns(tokens, mask, whole).unbind(-1), (_mean(column, mask) for column in whole))]


def build_seals(tokens: Tensor, mask: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Seal columns of the rows with these tokens, by name.

    Args:
        tokens, mask: "responses" and "response_mask", nested or padded.
        columns: per-token columns in the same layout, or per-row columns.
    """
    by_token = {name: column for name, column in columns.items() if column.is_nested or column.shape == mask.shape}
    sealed = dict(zip(by_token, seal_columns(tokens, mask, [*by_token.values()]), strict=True)) if by_token else {}
    return sealed | {
        name: _join(hash_numbers(column), column.detach().double().reshape(len(column), -1).mean(-1))
        for name, column in columns.items()
        if name not in by_token
    }


def seal_constant(number: int, rows: int) -> Tensor:
    """Seal a 64-bit number that is the same for all rows: (B, 3) int32."""
    return _join(torch.full((rows,), number, dtype=torch.int64), torch.zeros(rows))


def _join(hashes: Tensor, means: Tensor) -> Tensor:
    # contiguous() is not sufficient, because it keeps the stride of a one-row column, which ``view`` reads.
    halves = hashes.clone(memory_format=torch.contiguous_format).view(torch.int32).reshape(-1, 2)
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
    """Compare the loss's columns with their seals; fetching the result raises ``SealError`` if a column has changed.

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
        raise SealError(
            f"{', '.join(absent)} did not reach the loss, although checksums of these columns were sent with the "
            "sequences."
        )
    values = [column.detach().float() for column in by_token.values()]
    found = dict(zip(by_token, hash_columns(tokens, mask, values).unbind(-1), strict=True))
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
        name, row = names[at], int(broken[at].nonzero()[0])
        of_rows = f"{counts[at]} of {len(mask)} sequences of the micro-batch"
        if name == PLAN_HASH:
            raise SealError(f"the loss received the plan of another update with {of_rows}.{_END}")
        there = mask[row].bool()
        ids = tokens[row][there]
        begins = f"begins with the ids {ids[:4].tolist()}"
        if name == INPUT:
            raise SealError(
                f"the model's input changed before it reached the loss, in {of_rows}: input_ids or position_ids of "
                f"prompt or response. The response of sequence {row} {begins}.{_END}"
            )
        values = {**by_token, **by_row}[name][row]
        values = values[there] if values.shape == there.shape else values.reshape(-1)
        was = float(sealed[at, row, 2].cpu().view(torch.float32))
        raise SealError(
            f"{name} changed before it reached the loss, in {of_rows}. Sequence {row} has a response of {len(ids)} "
            f"tokens that {begins}: its mean was {was:.6g} at the source and is {float(values.double().mean()):.6g} in "
            f"the loss, beginning with {[float(f'{value:.4g}') for value in values[:4].tolist()]}.{_END}"
        )

    return DeferredValue(broken.sum(-1), judge)


def compare_engine(tokens: Tensor, mask: Tensor, *, fed: Tensor | None, counted: Tensor | None) -> DeferredValue[None]:
    """Compare the loss's tokens and mask with the engine's; fetching the result raises ``SealError`` if they differ.

    Args:
        tokens: (B, T).
        mask: (B, T) bool.
        fed: (B, T) the model's input at the response positions; None: unknown.
        counted: mask that the engine uses to count the tokens of a mini-batch, in any layout; None: unknown.
    """

    def judge(numbers: list[int]) -> None:
        other, of_loss, engines = numbers
        if other:
            raise SealError(
                f"input_ids and responses differ at {other} of {of_loss} response tokens of the micro-batch, so log pi "
                f"belongs to the wrong tokens. Code between trainer and engine changed one of them.{_END}"
            )
        if engines != of_loss:
            raise SealError(
                f"loss_mask has {engines} tokens in a micro-batch, but response_mask has {of_loss}, and the engine "
                f"divides the loss by the sum of loss_mask. Code between trainer and engine changed loss_mask.{_END}"
            )

    of_loss = mask.sum()
    other = torch.zeros_like(of_loss) if fed is None else ((fed != tokens) & mask).sum()
    engines = of_loss if counted is None else counted.sum(dtype=torch.int64)
    return DeferredValue(torch.stack([other, of_loss, engines]), judge)


class SealedRows:
    """Seals of one batch, by the keys of its rows.

    Args:
        keys: keys of the rows.
        tokens, mask: "responses" and "response_mask" of these rows, nested or padded.
    """

    def __init__(self, keys: Sequence[str], tokens: Tensor, mask: Tensor) -> None:
        self.keys = list(keys)
        self.tokens, self._mask = tokens, mask
        self._seals: dict[str, Tensor] = {}

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Seal columns of all rows, replacing earlier seals of the same names."""
        self._seals |= build_seals(self.tokens, self._mask, columns)

    def moved_to(self, keys: Sequence[str], tokens: Tensor, mask: Tensor) -> SealedRows:
        """Return the seals of the rows with these keys, a subset of all rows."""
        place = {key: row for row, key in enumerate(self.keys)}
        rows = torch.tensor([place[key] for key in keys])
        moved = SealedRows(keys, tokens, mask)
        moved._seals = {name: seal[rows] for name, seal in self._seals.items()}
        return moved

    @property
    def names(self) -> list[str]:
        """Names of the sealed columns."""
        return list(self._seals)

    def columns(self) -> dict[str, Tensor]:
        """Return the seals as columns to send with the batch."""
        return {key_of(name): seal for name, seal in self._seals.items()}


def compute_row_checksums(responses: Tensor, response_mask: Tensor, rollout_log_prob: Tensor) -> list[int]:
    """Compute a 64-bit checksum of each row's response tokens and their mu, bitwise; padding is ignored.

    Any shift, cast or replacement of mu, and any permutation of its rows, changes the checksum, so it ties mu to its
    tokens. Rows without a response token are skipped.

    Args:
        responses: (B, T) token ids, or nested by row, like the other columns.
        response_mask: (B, T) bool or 0/1.
        rollout_log_prob: (B, T) log mu, of any float dtype.
    """
    (found,) = fetch([DeferredValue(hash_rows(responses, response_mask, rollout_log_prob), drop_empty_rows)])
    return list(found)


def drop_empty_rows(hashes: list[int]) -> list[int]:
    """Drop the hashes of rows without a response token."""
    return [one for one in hashes if one]


INPUT_COLUMNS = ("input_ids", "position_ids")
"""Columns of the model input, nested by row, or padded and accompanied by "attention_mask"."""


@torch.no_grad()
def hash_model_input(rows: TensorDict) -> Tensor:
    """Hash each row's ``INPUT_COLUMNS``, (B,) int64; the hash is the same for nested and for padded columns.

    Args:
        rows: contains ``INPUT_COLUMNS``; position_ids are (B, L), or (B, K, L) for models with K position axes.
    """
    tokens, positions = (rows[name] for name in INPUT_COLUMNS)
    if not tokens.is_nested:
        axes = positions if positions.dim() == 3 else positions[:, None]
        # Positions are small integers, which float32 represents exactly.
        return _combine(hash_columns(tokens, rows["attention_mask"], [*axes.float().unbind(1)]))
    ids, axes = values_of(tokens), values_of(positions)
    if axes.shape[-1] != len(ids):
        # torch nests (K, L) rows of one length along K instead of L.
        axes = axes.view(len(rows), -1, axes.shape[-1]).transpose(0, 1).flatten(1)
    layout = PackedRows(tokens.offsets(), len(ids), tokens)
    return _combine(hash_block(layout, ids, torch.ones_like(ids, dtype=torch.bool), axes.float().view(-1, len(ids))))


def _combine(hashes: Tensor) -> Tensor:
    """Combine the hashes of the position axes, (B, K), into a sum with odd factors, which wraps around."""
    return (hashes * torch.arange(1, 2 * hashes.shape[1], 2, device=hashes.device)).sum(-1)


def find_difference(
    sent: Mapping[str, int], seen: Iterable[int], left: Mapping[str, str] | None = None, epochs: int = 1
) -> str | None:
    """Compare the rows sent with the rows received, by hash; the loss receives each row once per epoch.

    Args:
        sent: key of each row -> hash of the row.
        seen: hashes that the loss has reported, in any order.
        left: key of each row that was removed, so that the loss must not receive it -> the reason.
        epochs: number of times that the loss receives each row.

    Returns:
        A description of the difference; None if there is none.

    Example:
        >>> find_difference({"a": 7, "b": 8}, [8, 7, 7, 8], epochs=2)
        >>> find_difference({"a": 7, "b": 8}, [7, 8], {"b": "too old"})
        '1 of 2 rows expected (1 left: too old), 2 seen: 1 had left (b)'
    """
    left, seen = left or {}, [*seen]
    gone = [key for key in sent if key in left]
    wanted = {key: number for key, number in sent.items() if key not in left}
    if are_same_rows([*wanted.values()], seen, epochs):
        return None
    # If several rows have the same hash, the surplus is counted for each of them.
    surplus = Counter(seen)
    surplus.subtract(Counter([*wanted.values()] * epochs))
    known, expected = {*sent.values()}, {*wanted.values()}
    unknown = sum(count for number, count in surplus.items() if number not in known)
    kinds = {
        "missing or changed": [key for key, number in wanted.items() if surplus[number] < 0],
        "too often": [key for key, number in wanted.items() if surplus[number] > 0],
        "had left": [key for key in gone if sent[key] not in expected and surplus[sent[key]] > 0],
    }
    parts = [f"{len(keys)} {what} ({', '.join(keys[:3])})" for what, keys in kinds.items() if keys]
    parts += [f"{unknown} were not sent with this content"] * bool(unknown)
    reasons = f" ({len(gone)} left: {'; '.join(sorted({left[key] for key in gone}))})" if gone else ""
    times = f", {epochs} epochs" if epochs > 1 else ""
    return f"{len(wanted)} of {len(sent)} rows expected{reasons}{times}, {len(seen)} seen: {', '.join(parts)}"


def are_same_rows(sent: Sequence[int], seen: Sequence[int], times: int = 1) -> bool:
    """Return True if the loss received exactly the rows that were sent, ``times`` times each.

    Example:
        >>> are_same_rows([7, 8], [8, 7, 7, 8], times=2)
        True
    """
    # The numbers are sorted, because counting them by hash takes ten times as long for a large batch.
    return len(seen) == times * len(sent) and np.array_equal(_sort(seen), _sort(sent).repeat(times))


def _sort(rows: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.sort(np.array(rows, dtype=np.int64))
