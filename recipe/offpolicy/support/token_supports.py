"""Supports of sampled tokens: read from vLLM's log-probs, sent as notes, and assigned to the tokens of a forward pass.

vLLM returns the K largest processed log-probs per token, which are -inf outside the support. The ids with finite
log-probs are the whole support if any of the K log-probs is not finite, or if the probabilities of these ids sum to 1.
Score centering keeps all K ids with their log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch.padding import Layout
from ..batch.weight_versions import read_extra_fields
from ..replay.batch_routes import TokenLayout, count_shared, hash_tokens


class SupportError(RuntimeError):
    """The support of truncated sampling is missing, incomplete or belongs to other tokens."""


def compute_truncated_log_probs(
    logits: Tensor, places: Tensor, tokens: Tensor, ids: Tensor, temperature: Tensor
) -> Tensor:
    """Compute log p(token) - log p(support) from the logits alone: z(token) - logsumexp of z over the support.

    The logits are divided by the temperature first, in vLLM's order. The gradient reaches only the token's logit and
    the logits of its support.

    Args:
        logits: (N, V) float.
        places: (m,) int64, the row of ``logits`` from which each token was sampled.
        tokens: (m,) int64.
        ids: (m, K) integers, the support of each token in any order, padded with -1; K may be 0 if m is 0.
        temperature: (m,) float.

    Returns:
        (m,) float32, or float64 for float64 logits; above 0 if a token is not in its support.

    Example:
        >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
        >>> at, token, ids = torch.tensor([0]), torch.tensor([1]), torch.tensor([[0, 1, -1]])
        >>> compute_truncated_log_probs(logits, at, token, ids, torch.ones(1)).exp()
        tensor([0.3333])
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scale = temperature.to(dtype).clamp(min=1e-8)
    inside = ids >= 0
    # The logits are gathered before the cast, so that no tensor of vocabulary size is created.
    of_support = logits[places[:, None], ids.clamp(min=0).long()].to(dtype) / scale[:, None]
    own = logits[places, tokens].to(dtype) / scale
    return own - of_support.masked_fill(~inside, -torch.inf).logsumexp(-1)


def find_inside(tokens: Tensor, ids: Tensor) -> Tensor:
    """Flag the tokens, (m,) bool, that are in their own support.

    Args:
        tokens: (m,) integers.
        ids: (m, K) integers, padded with -1.
    """
    return (ids == tokens[:, None]).any(-1)


MASS = 1e-3
"""Largest deviation of a complete support's probability mass from 1."""
_LEAST = -1e30
"""A log-prob at or below this value belongs to a token that could not be sampled."""

Array = npt.NDArray[Any]
_NONE = np.zeros(0, np.float32)


@dataclass(frozen=True)
class TokenSupports:
    """Supports of n sampled tokens.

    Attributes:
        sizes: (n,) unsigned integers, number of ids in each token's support; 0 if unknown.
        ids: (sum of sizes,) unsigned integers, the sampled token's id first.
        masses: (n,) float32, sum of mu over the ids that the engine returned.
        log_probs: (sum of sizes,) float32, log mu of the ids; empty for support replay, which does not read them. If
            given, the ids are the likeliest tokens in descending order, and the sampled token may be missing.
    """

    sizes: Array
    ids: Array
    masses: Array
    log_probs: Array = field(default_factory=lambda: _NONE)

    @classmethod
    def empty(cls) -> TokenSupports:
        """Build the supports of zero tokens."""
        return cls(np.zeros(0, np.uint8), np.zeros(0, np.uint8), _NONE)

    @property
    def bytes(self) -> int:
        """Bytes of sizes, ids and log-probs."""
        return int(self.sizes.nbytes + self.ids.nbytes + self.log_probs.nbytes)

    def cut(self, start: int, end: int) -> TokenSupports:
        """Take the tokens from ``start`` to ``end``, exclusive."""
        ends = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        end = min(end, len(self.sizes))
        start = min(start, end)
        of_ids = slice(ends[start], ends[end])
        return TokenSupports(self.sizes[start:end], self.ids[of_ids], self.masses[start:end], self.log_probs[of_ids])

    @classmethod
    def concatenate(cls, parts: Sequence[TokenSupports]) -> TokenSupports:
        """Concatenate the supports of several runs of tokens."""
        parts = [cls.empty(), *parts]
        names = ("sizes", "ids", "masses", "log_probs")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def pad(self) -> npt.NDArray[np.int64]:
        """Return the ids as (n, largest size), padded with -1."""
        return self._lay_out(self.ids, -1, np.dtype(np.int64))

    def pad_log_probs(self) -> npt.NDArray[np.float32]:
        """Return the log-probs as (n, largest size), padded with -inf; (n, 0) if there are none."""
        if not len(self.log_probs):
            return np.zeros((len(self.sizes), 0), np.float32)
        return self._lay_out(self.log_probs, -np.inf, np.dtype(np.float32))

    def _lay_out(self, values: Array, padding: float, dtype: np.dtype[Any]) -> Array:
        sizes = self.sizes.astype(np.int64)
        laid = np.full((len(sizes), int(sizes.max(initial=0))), padding, dtype)
        laid[np.arange(laid.shape[1]) < sizes[:, None]] = values
        return laid


def read_supports(
    ids: Sequence[int], log_probs: Sequence[float], count: int, *, likeliest: bool = False
) -> TokenSupports:
    """Read the supports of sampled tokens from vLLM's result, which lists the sampled id and then the K likeliest ids.

    Args:
        ids, log_probs: values of all tokens, concatenated.
        count: number of sampled tokens.
        likeliest: read the K most likely ids and their log-probs, even if they are not the whole support.
    """
    if not count:
        return TokenSupports.empty()
    rows = np.asarray(ids, np.int64).reshape(count, -1)
    found = np.asarray(log_probs, np.float64).reshape(count, -1)
    finite = found > _LEAST
    # The sampled token comes first, and appears again if it is among the most likely ids.
    first = np.arange(rows.shape[1]) == 0
    inside = finite & (~first if likeliest else first | (rows != rows[:, :1]))
    masses = np.exp(np.where(inside, found, -np.inf)).sum(1)
    if not likeliest:
        # Accept a support only if it is complete; the trainer also checks its mass.
        inside &= ((~finite).any(1) | (np.abs(masses - 1.0) <= MASS))[:, None]
    sizes = inside.sum(1)
    return TokenSupports(
        _narrow(sizes, sizes.max(initial=0)),
        _narrow(rows[inside], rows.max(initial=0)),
        masses.astype(np.float32),
        found[inside].astype(np.float32) if likeliest else _NONE,
    )


def _narrow(values: Array, largest: int) -> Array:
    return values.astype(np.min_scalar_type(int(largest)))


NOTE = "offpolicy_support"
"""Key of a row's note in its extra fields."""


@dataclass(frozen=True)
class RowSupports:
    """The note of one row, as received.

    Attributes:
        spans: (first position, tokens) of each run of sampled tokens; positions count from the row's first token.
        supports: supports of these tokens, without masses.
        masses: minimum and maximum of mu's sum over a known support, and the sum over the ids returned for tokens of
            unknown support.
        checksum: checksum of positions, tokens and supports.
    """

    spans: tuple[tuple[int, int], ...]
    supports: TokenSupports
    masses: tuple[float, float, float]
    checksum: int

    def list_places(self) -> Tensor:
        """List the position of each sampled token in the row, int64."""
        runs = [torch.arange(start, start + count) for start, count in self.spans]
        return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for sending, because TransferQueue turns classes into mappings."""
        return {
            "spans": [list(span) for span in self.spans],
            "sizes": self.supports.sizes,
            "ids": self.supports.ids,
            "log_probs": self.supports.log_probs,
            "masses": list(self.masses),
            "checksum": self.checksum,
        }


class SupportNote:
    """The note of one row during sampling; pickled as the plain values of a ``RowSupports``."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._supports = TokenSupports.empty()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.finish().to_plain(),)

    def add(self, prompt: Sequence[int], sampled: Sequence[int], supports: TokenSupports) -> None:
        """Add the tokens of the row's next request, made for another turn or after an aborted attempt.

        Args:
            prompt: ids of the request, starting with the row's earlier tokens.
            sampled: ids sampled by the request.
            supports: supports of the sampled ids.
        """
        shared = count_shared(self._tokens, prompt, len(prompt))
        kept = [(start, min(count, shared - start)) for start, count in self._spans if start < shared]
        earlier = self._supports.cut(0, sum(count for _, count in kept))
        if len(sampled):
            kept.append((len(prompt), len(sampled)))
        self._tokens, self._spans = [*prompt, *sampled], kept
        self._supports = TokenSupports.concatenate([earlier, supports])

    def finish(self) -> RowSupports:
        """Build the note for sending."""
        supports, masses = self._supports, self._supports.masses.astype(np.float64)
        known = supports.sizes > 0
        found = RowSupports(
            tuple(self._spans),
            replace(supports, masses=_NONE),
            (float(masses[known].min(initial=1)), float(masses[known].max(initial=1)), float(masses[~known].sum())),
            0,
        )
        places = found.list_places()
        tokens = torch.tensor(self._tokens, dtype=torch.int64)[places]
        laid = torch.from_numpy(supports.pad()), torch.from_numpy(supports.pad_log_probs())
        parts = hash_supports(places, tokens, *laid)
        return replace(found, checksum=int(parts.sum()))


def hash_supports(places: Tensor, tokens: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
    """Compute each token's contribution to its row's checksum, from position, token, ids, their order and log-probs.

    Args:
        places: (n,) int64, position in the row.
        tokens: (n,) int64.
        ids: (n, K) int64, padded with -1 to any width.
        log_probs: (n, K) float32 of the ids, compared bitwise; (n, 0) for none.

    Returns:
        (n,) int64, to be summed over a row; wraps around.
    """
    # Padding, with id -1, adds nothing.
    parts = hash_tokens(torch.cat([tokens[:, None], ids], 1)[:, None], places)
    if not log_probs.shape[1]:
        return parts
    bits = log_probs.contiguous().view(torch.int32).long().masked_fill(torch.isinf(log_probs), -1)
    return parts + 3 * hash_tokens(bits[:, None], places)


def read_note(found: Any) -> RowSupports | None:
    """Read a row's note as received; None if it is missing or inconsistent."""
    if isinstance(found, SupportNote):
        return found.finish()
    if not isinstance(found, Mapping):
        return None
    try:
        sizes, ids, log_probs = (np.asarray(found[name]) for name in ("sizes", "ids", "log_probs"))
        spans = tuple((int(start), int(count)) for start, count in found["spans"])
        least, greatest, unknown = (float(each) for each in found["masses"])
        checksum = int(found["checksum"])
    except (KeyError, TypeError, ValueError):
        return None
    if len(sizes) != sum(count for _, count in spans) or len(ids) != int(sizes.sum(dtype=np.int64)):
        return None
    if len(log_probs) not in (0, len(ids)):
        return None
    return RowSupports(spans, TokenSupports(sizes, ids, _NONE, log_probs), (least, greatest, unknown), checksum)


@dataclass(frozen=True)
class ResponseTokens:
    """Positions of a micro-batch's response tokens, in the order of its columns.

    Attributes:
        places: (R,) int64, position of each response token among the micro-batch's tokens; 0 on padding.
        trained: (R,) bool, the response mask.
        nested: True if columns are nested by row, without padding.
    """

    places: Tensor
    trained: Tensor
    nested: bool

    @classmethod
    def of(cls, data: TensorDict, offsets: Tensor) -> ResponseTokens:
        """Build the positions of one micro-batch.

        Args:
            offsets: (B + 1,) start of each row's prompt and response.
        """
        mask = data["response_mask"]
        if mask.is_nested:
            # A response extends to the end of its row.
            lengths = mask.offsets().diff()
            count = len(mask.values())
            before = torch.repeat_interleave(offsets[1:] - mask.offsets()[1:], lengths, output_size=count)
            return cls(before + torch.arange(count, device=offsets.device), mask.values().bool(), True)
        layout = Layout.of(data)
        places = (offsets[:-1] + layout.prompts)[:, None] + torch.arange(mask.shape[1], device=offsets.device)
        there = mask.bool() & ~layout.absent
        return cls(places.masked_fill(layout.absent, 0).flatten(), there.flatten(), False)

    def read(self, column: Tensor) -> Tensor:
        """Read a column of the responses: (R,)."""
        return column.values() if self.nested else column.flatten()


@dataclass(frozen=True)
class BatchSupports:
    """Supports of the n sampled tokens of a micro-batch whose rows have a note.

    Attributes:
        places: (n,) int64, position of each token in the micro-batch.
        rows, within: (n,) int64, row of each token, and its position in the row.
        ids: (n, K) int64, the ids in each token's support, padded with -1; none if the support is unknown.
        log_probs: (n, K) float32, log mu of the ids, padded with -inf; (n, 0) for support replay.
        sizes: (n,) int64, number of ids in each token's support.
        known, unknown: (k,) and (u,) int64, indices of tokens with known and unknown support.
        truncated: int64, indices of known supports that are smaller than the vocabulary.
        checksums: (B,) int64, checksums of the notes.
        compared: (B,) bool, rows with a note for all of their tokens.
        bytes: bytes of sizes and ids, as received.
        masses: of each row with a note, see ``RowSupports``.
    """

    places: Tensor
    rows: Tensor
    within: Tensor
    ids: Tensor
    log_probs: Tensor
    sizes: Tensor
    known: Tensor
    unknown: Tensor
    truncated: Tensor
    checksums: Tensor
    compared: Tensor
    bytes: int
    masses: list[tuple[float, float, float]]

    def hash_rows(self, tokens: Tensor) -> Tensor:
        """Compute the checksum of each row, (B,) int64, from these supports and their (n,) tokens."""
        parts = hash_supports(self.within, tokens, self.ids, self.log_probs)
        return torch.zeros_like(self.checksums).index_add_(0, self.rows, parts)


def read_notes(data: TensorDict) -> list[RowSupports | None]:
    """Read the note of each row; None if it is missing or inconsistent."""
    if NOTE in data.keys():
        found: list[Any] = [getattr(row, "data", row) for row in data[NOTE]]
    else:
        found = [fields.get(NOTE) for fields in read_extra_fields(data)]
    found += [None] * (data.batch_size[0] - len(found))
    return [read_note(each) for each in found]


def lay_out_supports(data: TensorDict, layout: TokenLayout, vocabulary: int) -> BatchSupports:
    """Assign the supports of a micro-batch to its tokens; drop entries beyond the end of a row.

    Args:
        vocabulary: number of logits per token.
    """
    notes, offsets = read_notes(data), layout.offsets.tolist()
    kept = []
    checksums, compared = [0] * len(notes), [False] * len(notes)
    for row, note in ((row, note) for row, note in enumerate(notes) if note is not None):
        own = note.list_places()
        there = int((own < offsets[row + 1] - offsets[row]).sum())
        compared[row], checksums[row] = there == len(own), note.checksum
        kept.append((row, own[:there], note.supports.cut(0, there)))
    joined = TokenSupports.concatenate([supports for _, _, supports in kept])
    has = joined.sizes > 0
    device = layout.offsets.device

    def put(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    none = torch.zeros(0, dtype=torch.int64)
    return BatchSupports(
        places=put(torch.cat([none, *(own + offsets[row] for row, own, _ in kept)])),
        rows=put(torch.cat([none, *(torch.full_like(own, row) for row, own, _ in kept)])),
        within=put(torch.cat([none, *(own for _, own, _ in kept)])),
        ids=put(torch.from_numpy(joined.pad())),
        log_probs=put(torch.from_numpy(joined.pad_log_probs())),
        sizes=put(torch.from_numpy(joined.sizes.astype(np.int64))),
        known=put(torch.from_numpy(has.nonzero()[0])),
        truncated=put(torch.from_numpy((has & (joined.sizes < vocabulary)).nonzero()[0])),
        unknown=put(torch.from_numpy((~has).nonzero()[0])),
        checksums=put(torch.tensor(checksums, dtype=torch.int64)),
        compared=put(torch.tensor(compared)),
        bytes=joined.bytes,
        masses=[note.masses for note in notes if note is not None],
    )
