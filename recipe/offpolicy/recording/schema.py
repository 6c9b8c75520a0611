"""Recorded rows as numpy arrays, and the only definition of the names and types of their columns.

A file contains one step of one rank, or one update if a step consists of several. Token columns are lists over the
response, from its first token to its last valid token; tool outputs in between are included, with ``response_mask``
False. All lists of a row have the same length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

VERSION = 3
"""Version of the schema, which increases whenever a column is added or removed, the meaning of a column changes, or the
digest changes."""
ADDED = {"version": 2}
"""Columns that are missing in older files -> the version that added them."""

VERSION_KEY = b"offpolicy.schema"
"""Key of the file's metadata: ``VERSION``, in digits."""
SPEC_KEY = b"offpolicy.correction"
"""Key of the file's metadata: the correction that was active, as JSON of ``CorrectionSpec.to_mapping``."""
REASONS_KEY = b"offpolicy.rejected_by"
"""Key of the file's metadata: JSON list of the parts that can reject (such as ``masks.gsm``), in the order of the bits
of ``rejected_by``."""
DIGEST_KEY = b"offpolicy.digest"
"""Key of the file's metadata: ``digest`` of everything else that a reader obtains from the file."""

FAST_DIGEST = 3
"""First version whose digest is XXH3; earlier versions use BLAKE2b."""

UNKNOWN_VERSION = -1
"""Version of the weights in rows for which verl does not record the version."""

ROW_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int64(), "the trainer's step, counted from 1; a step begins with weights of version step - 1"),
    "rank": (pa.int32(), "data-parallel rank"),
    "mini_batch": (
        pa.int32(),
        "number of gradient steps in this training step before the one that first used the row",
    ),
    "uid": (pa.string(), "the prompt's group, as named by verl; empty if unknown"),
    "reward": (pa.float32(), "sum of the row's scores, before a KL penalty in the reward; NaN if unknown"),
    "oldest_version": (pa.int64(), "version of the weights with which the first token was sampled; -1 if unknown"),
    "newest_version": (pa.int64(), "version of the weights with which the last token was sampled; -1 if unknown"),
    "length": (pa.int32(), "T, number of valid response tokens"),
}
TOKEN_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "response_ids": (pa.int32(), "token ids"),
    "response_mask": (pa.bool_(), "True if the policy generated the token"),
    "rollout_log_prob": (pa.float32(), "log mu"),
    "old_log_prob": (pa.float32(), "log pi_old, as the correction uses it"),
    "log_prob": (pa.float32(), "log pi at the first gradient step that used the row"),
    "advantages": (pa.float32(), "advantages, as verl's loss uses them"),
    "weight": (
        pa.float32(),
        "weight by which the correction multiplies the policy term, without masks and without the scale of "
        "denominator=kept; 0 if the token is not valid",
    ),
    "rejected_by": (
        pa.uint32(),
        "one bit for each part of the correction that rejected the token; 0 if the token was kept or is not valid "
        "(response_mask is false, or mu or pi_old is non-finite)",
    ),
    "turn": (pa.int16(), "index of the policy's turn in the row, from 0; -1 if response_mask is false"),
    "version": (
        pa.int32(),
        "version of the weights with which the token was sampled; -1 if it is unknown or response_mask is false",
    ),
}
EXTENSION_PREFIX = "offpolicy_"
"""Prefix of additional token columns that extensions record: lists of float32, after all other columns."""
WITHOUT_REPLAY = "offpolicy_old_log_prob_without_replay"
"""Additional column: log pi_old under the trainer's own expert routes, recorded with
``offpolicy.record.without_replay``."""
PROMPT_COLUMN = "prompt_ids"
"""Token ids of the prompt; empty where prompts were not recorded."""


def _declare_list(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)


SCHEMA = pa.schema(
    [
        *(pa.field(name, kind, nullable=False) for name, (kind, _) in ROW_COLUMNS.items()),
        _declare_list(PROMPT_COLUMN, pa.int32()),
        *(_declare_list(name, kind) for name, (kind, _) in TOKEN_COLUMNS.items()),
    ]
)


def has_column(name: str, version: int) -> bool:
    """Return True if files of this version have the column."""
    return ADDED.get(name, 1) <= version


def extend_schema(names: Iterable[str], version: int = VERSION) -> pa.Schema:
    """Extend the schema of this version with columns of extensions."""
    own = (field for field in SCHEMA if has_column(field.name, version))
    return pa.schema([*own, *(_declare_list(name, pa.float32()) for name in names)])


@dataclass(frozen=True)
class Rows:
    """N responses with M tokens in total; see ``schema`` for the meaning of each column.

    Attributes:
        step, rank, mini_batch, uid, reward, oldest_version, newest_version, length: (N,).
        offsets: (N + 1,) int64; row i has the tokens offsets[i] to offsets[i + 1].
        response_ids, response_mask, rollout_log_prob, old_log_prob, log_prob, advantages, weight, rejected_by, turn,
            version: (M,).
        prompt_offsets: (N + 1,) int64, offsets of the rows in ``prompt_ids``.
        prompt_ids: (P,) int32; empty if prompts were not recorded.
        extensions: column of an extension -> (M,).
    """

    step: NDArray[np.int64]
    rank: NDArray[np.int32]
    mini_batch: NDArray[np.int32]
    uid: NDArray[np.object_]
    reward: NDArray[np.float32]
    oldest_version: NDArray[np.int64]
    newest_version: NDArray[np.int64]
    length: NDArray[np.int32]
    offsets: NDArray[np.int64]
    response_ids: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    rollout_log_prob: NDArray[np.float32]
    old_log_prob: NDArray[np.float32]
    log_prob: NDArray[np.float32]
    advantages: NDArray[np.float32]
    weight: NDArray[np.float32]
    rejected_by: NDArray[np.uint32]
    turn: NDArray[np.int16]
    version: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]
    prompt_ids: NDArray[np.int32]
    extensions: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """M, the number of tokens of all rows, including tool outputs."""
        return int(self.offsets[-1])

    @property
    def row_of_token(self) -> NDArray[np.int64]:
        """(M,) the row of each token."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def position(self) -> NDArray[np.int64]:
        """(M,) the position of each token in its response, from 0."""
        return np.arange(self.tokens) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    @property
    def staleness(self) -> NDArray[np.int64]:
        """(N,) steps from the weights that sampled a row to the weights at the start of its step; -1 if unknown."""
        known = self.oldest_version >= 0
        return np.where(known, np.maximum(self.step - 1 - self.oldest_version, 0), -1)

    @cached_property
    def token_staleness(self) -> NDArray[np.int64]:
        """(M,) steps from the weights that sampled a token to the weights at the start of the token's step.

        A token of unknown version has the age of the first token of its row, or -1 if that age is unknown too.
        """
        lengths = np.diff(self.offsets)
        age = np.repeat(self.step - 1, lengths)
        age -= self.version
        np.maximum(age, 0, out=age)
        unknown = self.version == UNKNOWN_VERSION
        return np.where(unknown, np.repeat(self.staleness, lengths), age) if unknown.any() else age

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Rows:
        """Return only these rows, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        tokens, offsets = _places(self.offsets, index)
        prompts, prompt_offsets = _places(self.prompt_offsets, index)
        return self._select(index, tokens, prompts, offsets, prompt_offsets)

    def between(self, start: int, stop: int) -> Rows:
        """Return the rows from ``start`` up to, but not including, ``stop``, without a copy of their tokens."""
        offsets, prompt_offsets = (each[start : stop + 1] for each in (self.offsets, self.prompt_offsets))
        tokens, prompts = (slice(int(each[0]), int(each[-1])) for each in (offsets, prompt_offsets))
        return self._select(slice(start, stop), tokens, prompts, offsets - tokens.start, prompt_offsets - prompts.start)

    def _select(
        self, rows: Any, tokens: Any, prompts: Any, offsets: NDArray[np.int64], prompt_offsets: NDArray[np.int64]
    ) -> Rows:
        """Index the columns per row, the columns per token and the prompts."""
        values: dict[str, Any] = {name: getattr(self, name)[rows] for name in ROW_COLUMNS}
        values |= {name: getattr(self, name)[tokens] for name in TOKEN_COLUMNS}
        values["extensions"] = {name: column[tokens] for name, column in self.extensions.items()}
        values["prompt_ids"] = self.prompt_ids[prompts]
        return Rows(**values, offsets=offsets, prompt_offsets=prompt_offsets)

    def padded(self, *names: str) -> dict[str, Tensor]:
        """Pad token columns to (N, longest) tensors with zeros (False); ``response_mask`` is always among them."""
        lengths = np.diff(self.offsets)
        place = np.arange(int(lengths.max(initial=0)))[None, :] < lengths[:, None]
        result = {}
        for name in dict.fromkeys(("response_mask", *names)):
            values = getattr(self, name)
            wide = np.zeros(place.shape, dtype=values.dtype if values.dtype != np.uint32 else np.int64)
            wide[place] = values
            result[name] = torch.from_numpy(wide)
        return result


def spread_versions(
    oldest: NDArray[np.int64], newest: NDArray[np.int64], mask: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> NDArray[np.int32]:
    """For rows with a single version, assign this version to all their tokens: (M,) int32."""
    single = np.where(oldest == newest, oldest, UNKNOWN_VERSION).astype(np.int32)
    return np.where(mask, np.repeat(single, np.diff(offsets)), np.int32(UNKNOWN_VERSION))


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of all ``parts``, in order; a single part is returned unchanged.

    Raises:
        ValueError: there is no part.
    """
    if not parts:
        raise ValueError("no rows to concatenate: expected at least one part.")
    if len(parts) == 1:
        return parts[0]
    values: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (*ROW_COLUMNS, *TOKEN_COLUMNS, PROMPT_COLUMN)
    }
    for name in ("offsets", "prompt_offsets"):
        values[name] = compute_offsets(np.concatenate([np.diff(getattr(part, name)) for part in parts]))
    # The rows for which an extension was off contain NaN.
    values["extensions"] = {
        name: np.concatenate(
            [part.extensions.get(name, np.full(part.tokens, np.nan, dtype=np.float32)) for part in parts]
        )
        for name in dict.fromkeys(name for part in parts for name in part.extensions)
    }
    return Rows(**values)


def compute_offsets(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Compute the (N + 1,) offsets of N consecutive lists from their lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _places(offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of the elements of ``rows``, and their offsets after concatenation."""
    lengths = np.diff(offsets)[rows]
    ends = compute_offsets(lengths)
    return np.arange(ends[-1]) + np.repeat(offsets[:-1][rows] - ends[:-1], lengths), ends
