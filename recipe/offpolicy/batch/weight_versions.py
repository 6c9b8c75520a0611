"""Versions of the weights that sampled each row and each token, as recorded by agent loops and ``staleness.client``.

A chunk is (version, tokens): the tokens that one attempt at a request sampled. A turn consists of the chunks of one
request, and a row has one or more turns. Tool outputs split the response mask into runs, and each turn is aligned with
one run.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ..correction import CorrectionSpec
from ..correction.correction_parts import BY_AGE
from ..correction.problem import format_value
from ..correction.row_layout import PackedRows, RowLayout, detect_layout, split_tokens, spread_over_tokens
from .seals import SealError

EXTRA_FIELDS = "extra_fields"
"""Key of each row's mapping in which verl's V1 trainer stores the versions."""
OLDEST_VERSION, NEWEST_VERSION = "min_global_steps", "max_global_steps"
"""Keys in these mappings and in a row's tags: versions of the weights that sampled the row's first and last token."""
VERSION = "global_steps"
"""Key of the version that a rollout server returns with its answer."""
VERSIONS = "offpolicy_versions"
"""Key of the (B, 2) int64 column of oldest and newest versions of each row, which the V0 trainer sends."""
VERSIONS_SEALED = "versions"
"""Name of the seal that covers each row's oldest and newest weight versions."""
TOKEN_VERSIONS_SEALED = "token_versions"
"""Name of the seal that covers each token's weight version. This seal replaces ``VERSIONS_SEALED`` if the correction
reads per-token versions."""


@dataclass(frozen=True)
class RowVersions:
    """Versions of the weights at each row's first and last token; see ``TokenVersions`` for the tokens in between.

    Attributes:
        oldest, newest: (B,) int64, the trainer's step after which the weights were synchronised.
    """

    oldest: Tensor
    newest: Tensor

    def by_token(self, like: Tensor) -> Tensor:
        """Compute the version that sampled each token, as int64 in the layout and shape of ``like``.

        Raises:
            ValueError: a row was sampled by several versions.
        """
        if mixed := int((self.oldest != self.newest).sum()):
            raise ValueError(
                f"level=version: {mixed} sequences were sampled by several versions of the weights, and the version of "
                f"each token is unknown. Set level=turn or level=sequence."
            )
        return spread_over_tokens(self.oldest, like)

    def column_to_seal(self, like: Tensor) -> Tensor:
        """Encode all version information that a loss reads: int64 per token, in the layout of ``like``.

        The value is the token's version or, if that is unknown, -1 minus the oldest version of the row.
        """
        return spread_over_tokens(torch.where(self.oldest == self.newest, self.oldest, -1 - self.oldest), like)

    def compute_ages(self, step: int, like: Tensor) -> Tensor:
        """Compute each row's age in ``step`` from its oldest version: (B,) int64 >= 0, on the device of ``like``."""
        # At the start of step s, the weights have version s - 1.
        return (step - 1 - self.oldest).clamp(min=0).to(like.device)

    def check_ages(self, spec: CorrectionSpec) -> None:
        """Check that the ages needed by parts of ``spec`` are known.

        Raises:
            ValueError: a row was sampled by several versions, and a part needs more than one age per row.
        """
        parts = {key: part for key, part in spec.age_parts.items() if part.level != "sequence"}
        by_token = spec.alpha == BY_AGE
        mixed = int((self.oldest != self.newest).sum()) if parts or by_token else 0
        if mixed and by_token:
            raise ValueError(
                f"correction.alpha=by_age: {mixed} sequences were sampled by several versions of the weights, and the "
                f"version of each token is unknown. Set correction.alpha=0.5 for example."
            )
        for key, part in parts.items() if mixed else ():
            at, value = (
                ("level", part.level) if part.by_staleness is None else ("by_staleness", list(part.by_staleness))
            )
            other = "" if part.by_staleness is None else f", or correction.{key}.by_staleness=null"
            raise ValueError(
                f"correction.{key}.{at}={format_value(value)}: {mixed} sequences were sampled by several versions of "
                "the weights, and the version of each token is unknown, for example because you use a custom client "
                f"or agent loop. Set correction.{key}.level=sequence, which uses the age of the first token{other}."
            )

    def find_unknown(self, response_mask: Tensor) -> Tensor:
        """Flag the rows that have a token of unknown version: (B,) bool.

        Args:
            response_mask: (B, T) bool.
        """
        return (self.oldest != self.newest).to(response_mask.device) & response_mask.any(-1)


def read_row_versions(data: TensorDict, extra_fields: Sequence[Mapping[str, Any]]) -> RowVersions | None:
    """Read the versions of the rows of a batch; None if verl does not record them.

    Args:
        extra_fields: result of ``read_extra_fields``; empty if the batch does not have these fields.
    """
    if VERSIONS in data.keys():
        return RowVersions(*data[VERSIONS].unbind(-1))
    if EXTRA_FIELDS not in data.keys():
        return None
    spans = [(row.get(OLDEST_VERSION), row.get(NEWEST_VERSION)) for row in extra_fields]
    if any(None in span for span in spans):
        return None
    return RowVersions(*torch.tensor(spans, dtype=torch.int64).reshape(-1, 2).unbind(-1))


def read_extra_fields(data: TensorDict) -> list[Mapping[str, Any]]:
    """Read the fields that the agent loop recorded for each row; empty if the batch does not have them."""
    return [getattr(row, "data", row) for row in data[EXTRA_FIELDS]] if EXTRA_FIELDS in data.keys() else []


def check_ages_known(spec: CorrectionSpec, versions: RowVersions | None, step: int | None) -> None:
    """Check that the ages needed by parts of ``spec`` are known; pass if no part needs ages.

    Raises:
        ValueError: verl does not record the versions, or does not record them per token although a part needs this, or
            the trainer's step is missing.
    """
    if not spec.age_keys:
        return
    if versions is None or step is None:
        key = spec.age_keys[0]
        lacking = "the trainer's step" if step is None else "the version of the weights that sampled each row"
        raise ValueError(
            f"correction.{key} depends on the age of the weights, but the batch does not contain {lacking}."
        )
    versions.check_ages(spec)


def compute_token_versions(versions: RowVersions | None, like: Tensor) -> Tensor:
    """Compute the version that sampled each token, as int64 in the layout of ``like``: (B, T), or nested by row.

    Raises:
        ValueError: verl does not record the versions, or does not record them per token.
    """
    if versions is None:
        raise ValueError(
            "level=version: verl does not record the version of the weights that sampled a token. Set level=sequence."
        )
    return versions.by_token(like)


Chunk = tuple[int, int]
CHUNKS = "offpolicy_chunks"
"""Key of a row's turns in its extra fields."""
CHUNK_SEALS = "offpolicy_chunk_seals"
"""Key, in a row's extra fields, of the hashes of its turns, computed by the client that recorded the chunks."""
UNKNOWN = -1
"""Value for tokens of unknown version, and outside the response mask."""

_TURN = 2**32  # must exceed the number of tokens of a turn


@dataclass(frozen=True)
class TokenVersions(RowVersions):
    """Versions of the weights, per row as verl records them, and per token.

    Attributes:
        tokens: int64 in the layout of the response mask; ``UNKNOWN`` in rows whose chunks do not match the mask.
    """

    tokens: Tensor

    def by_token(self, like: Tensor) -> Tensor:
        return self.tokens

    def column_to_seal(self, like: Tensor) -> Tensor:
        rows = detect_layout(tokens=self.tokens)
        return rows.to_given_layout(self._replace_unknown(rows, -1 - self.oldest))

    def _replace_unknown(self, rows: RowLayout, by_row: Tensor) -> Tensor:
        tokens = rows.tokens(self.tokens)
        return torch.where(tokens == UNKNOWN, rows.broadcast(rows.to_column(by_row.to(tokens.device))), tokens)

    def compute_ages(self, step: int, like: Tensor) -> Tensor:
        """Compute each token's age, int64 in the layout of ``tokens``; if its version is unknown, use the row's age."""
        rows = detect_layout(tokens=self.tokens)
        return rows.to_given_layout((step - 1 - self._replace_unknown(rows, self.oldest)).clamp(min=0))

    def check_ages(self, spec: CorrectionSpec) -> None:
        """Accept all parts, because a row whose chunks do not match its mask has the age of its first token."""

    def find_unknown(self, response_mask: Tensor) -> Tensor:
        return (response_mask & (self.tokens == UNKNOWN)).any(-1)


def hash_turn(chunks: Sequence[Chunk]) -> int:
    """Hash the chunks of a turn, in order, to 64 bits."""
    numbers = array("q", chain.from_iterable(chunks))
    return int.from_bytes(blake2b(numbers.tobytes(), digest_size=8).digest(), signed=True)


def check_chunks(fields: Sequence[Mapping[str, Any]]) -> None:
    """Check that each row's chunks are exactly what the client recorded; rows from other clients have no hash.

    Raises:
        SealError: the chunks of a row have changed.
    """
    for row, each in enumerate(fields):
        seals = each.get(CHUNK_SEALS)
        if seals is not None and [*seals] != [*map(hash_turn, each.get(CHUNKS) or ())]:
            raise SealError(
                f"the versions of the weights that sampled the tokens of sequence {row} changed between the client of "
                f"the rollout servers and the trainer: the trainer received (version, tokens) {each.get(CHUNKS)} for "
                f"the turns of this sequence. Fix: find the code that changes {CHUNKS} in {EXTRA_FIELDS}."
            )


def read_versions(data: TensorDict, response_mask: Tensor) -> RowVersions | None:
    """Read the versions of a batch: per token if a row has chunks, otherwise per row; None if verl records none.

    If verl and the chunks agree that one version sampled a whole row, all tokens of the row have that version.

    Args:
        response_mask: (B, T) or nested by row.
    """
    fields = read_extra_fields(data)
    by_row = read_row_versions(data, fields)
    if by_row is None or all(row.get(CHUNKS) is None for row in fields):
        return by_row
    one = torch.where(by_row.oldest == by_row.newest, by_row.oldest, UNKNOWN)
    # The mappings are read instead of tensors, because reading from a tensor may synchronise with a device.
    turns = []
    for row in fields:
        oldest, newest, chunks = (row.get(name) for name in (OLDEST_VERSION, NEWEST_VERSION, CHUNKS))
        alike = oldest == newest and all(version == oldest for turn in chunks or () for version, _ in turn)
        turns.append(None if alike else chunks)
    if any(row is not None for row in turns):
        tokens = lay_out(turns, response_mask, one)
    else:
        rows = detect_layout(mask=response_mask)
        mask, version = rows.tokens(response_mask).bool(), rows.to_column(one.to(response_mask.device))
        tokens = rows.to_given_layout(torch.where(mask, rows.broadcast(version), UNKNOWN))
    return TokenVersions(by_row.oldest, by_row.newest, tokens)


def lay_out(turns: Sequence[Sequence[Sequence[Chunk]] | None], response_mask: Tensor, by_row: Tensor) -> Tensor:
    """Assign the chunks of each row to the runs of its mask, one run per turn.

    A run may be shorter than its chunks if verl has truncated it. A row with a longer run, with fewer or more runs than
    turns, or with decreasing versions, is ``UNKNOWN``.

    Args:
        turns: turns of each row; None for a row without chunks.
        response_mask: (B, T) bool or 0/1, or nested by row.
        by_row: (B,) int64, the version of rows without chunks.

    Returns:
        int64 in the layout of the mask.

    Example:
        >>> lay_out([[[(3, 1), (4, 2)], [(4, 1)]]], torch.tensor([[1, 1, 0, 1]]), torch.tensor([-1])).tolist()
        [[3, 4, -1, 4]]
    """
    if response_mask.is_nested:
        blocks = [
            _lay_out_packed(turns[at], rows, columns["mask"].bool(), by_row[at])
            for at, rows, columns in split_tokens({"mask": response_mask})
            if isinstance(rows, PackedRows)
        ]
        return detect_layout(mask=response_mask).to_given_layout(torch.cat(blocks))
    table = _tabulate(turns).to(response_mask.device)
    mask = response_mask.bool()
    place = torch.arange(mask.shape[1], device=mask.device)
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    run = starts.cumsum(-1) - 1
    in_run = place - torch.where(starts, place, 0).cummax(-1).values if mask.numel() else run
    # The chunk of a token is the first chunk that ends after the token.
    index = torch.searchsorted(table[0], run * _TURN + in_run, right=True).clamp(max=table.shape[2] - 1)
    fits = (~mask | (table[1].gather(-1, index) == run)).all(-1) & (starts.sum(-1) == table[1].amax(-1) + 1)
    noted = torch.tensor([row is not None for row in turns], dtype=torch.bool, device=mask.device)
    laid = torch.where(fits[:, None], table[2].gather(-1, index), UNKNOWN)
    return torch.where(mask, torch.where(noted[:, None], laid, by_row.to(mask.device)[:, None]), UNKNOWN)


def _lay_out_packed(
    turns: Sequence[Sequence[Sequence[Chunk]] | None], rows: PackedRows, mask: Tensor, by_row: Tensor
) -> Tensor:
    """Assign the chunks to the tokens of concatenated rows, (N,), without padding to the longest row.

    Args:
        mask: (N,) bool.
    """
    device = mask.device
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    first = (mask & ~rows.equals_previous(mask)).nonzero().flatten()
    run_row, run_tokens = rows.row_index[first], torch.cat((before[first], before[-1:])).diff()
    runs = torch.bincount(run_row, minlength=rows.count)
    row, turn, version, tokens = _list_all_chunks(turns).to(device)
    fits = runs == torch.zeros_like(runs).scatter_reduce_(0, row, turn + 1, "amax")
    fits[row[1:][(version.diff() < 0) & (row.diff() == 0)]] = False
    row, turn, version, tokens = (column[fits[row]] for column in (row, turn, version, tokens))
    # In the remaining rows, each turn is one run.
    run = (runs.cumsum(0) - runs)[row] + turn
    sampled = torch.zeros_like(run_tokens).index_add_(0, run, tokens)
    end = tokens.cumsum(0) - (sampled.cumsum(0) - sampled)[run]
    used = torch.minimum(end, run_tokens[run]) - torch.minimum(end - tokens, run_tokens[run])
    fits[run_row[sampled < run_tokens]] = False
    noted = torch.tensor([each is not None for each in turns], dtype=torch.bool, device=device)
    laid = torch.where(mask, rows.broadcast(by_row.to(device).masked_fill(noted, UNKNOWN)), UNKNOWN)
    laid[mask & rows.broadcast(fits)] = version.repeat_interleave(used * fits[row])
    return laid


def _list_all_chunks(turns: Sequence[Sequence[Sequence[Chunk]] | None]) -> Tensor:
    """List the chunks of all rows: (4, C) int64, the row, turn, version and number of tokens of each chunk."""
    chunks = (
        (row, turn, *chunk)
        for row, each in enumerate(turns)
        for turn, attempts in enumerate(each or ())
        for chunk in attempts
    )
    return torch.from_numpy(np.fromiter(chain.from_iterable(chunks), np.int64).reshape(-1, 4).T.copy())


def _tabulate(turns: Sequence[Sequence[Sequence[Chunk]] | None]) -> Tensor:
    """Tabulate each row's chunks, (3, B, C + 1) int64: end within the turn + _TURN * turn, turn, and version.

    Positions without a chunk have turn -1; a row with decreasing versions has no chunks.
    """
    rows = [_list_chunks(row or ()) for row in turns]
    width = max((len(row) for row in rows), default=0) + 1
    none = (torch.iinfo(torch.int64).max, -1, UNKNOWN)
    filled = [row + [none] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int64).reshape(len(rows), width, 3).permute(2, 0, 1).contiguous()


def _list_chunks(row: Sequence[Sequence[Chunk]]) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    for turn, chunks in enumerate(row):
        end = 0
        for version, tokens in chunks:
            if found and version < found[-1][2]:
                return []
            end += tokens
            found.append((turn * _TURN + end, turn, version))
    return found


def find_token_versions(spec: CorrectionSpec, rows: TensorDict) -> dict[str, Tensor]:
    """Return name of the seal -> the versions to seal; empty if ``spec`` reads no versions or verl records none.

    Args:
        rows: contains "response_mask" and the keys that ``read_versions`` reads.

    Raises:
        SealError: the versions differ from those that the rollout servers' client recorded.
    """
    if not spec.reads_token_versions:
        return {}
    mask = rows["response_mask"]
    check_chunks(read_extra_fields(rows))
    versions = read_versions(rows, mask)
    return {} if versions is None else {TOKEN_VERSIONS_SEALED: versions.column_to_seal(mask)}
