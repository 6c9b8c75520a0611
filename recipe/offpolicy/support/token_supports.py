"""Supports of sampled tokens, read from vLLM's log-probs and sent as notes, and the softmax renormalised over them.

vLLM's processed log-probs are -inf outside the support. vLLM returns the K largest log-probs per token. The ids with
finite log-probs are the support if any of the other log-probs is not finite, or if the probabilities of these ids sum
to 1. Score centering keeps all K ids with their log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..replay.batch_routes import count_shared, hash_tokens


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
"""A log-prob of at most this value belongs to a token that could not be sampled."""

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
        likeliest: read the K most likely ids and their log-probs, whether or not they are the support.

    Raises:
        ValueError: tokens have different numbers of log-probs.
    """
    if not count:
        return TokenSupports.empty()
    if len(ids) % count or len(ids) != len(log_probs):
        raise ValueError(f"{len(ids)} ids and {len(log_probs)} log-probs do not fit {count} tokens.")
    rows = np.asarray(ids, np.int64).reshape(count, -1)
    found = np.asarray(log_probs, np.float64).reshape(count, -1)
    finite = found > _LEAST
    if likeliest:
        inside = finite.copy()
        inside[:, 0] = False  # the sampled token itself
        sizes = inside.sum(1)
        masses = np.exp(np.where(inside, found, -np.inf)).sum(1).astype(np.float32)
        ids_inside = _narrow(rows[inside], rows.max(initial=0))
        return TokenSupports(_narrow(sizes, sizes.max(initial=0)), ids_inside, masses, found[inside].astype(np.float32))
    # If the sampled token is among the most likely ids, it appears twice.
    inside = finite & np.concatenate([np.ones((count, 1), bool), rows[:, 1:] != rows[:, :1]], 1)
    masses = np.where(inside, np.exp(np.where(inside, found, 0.0)), 0.0).sum(1)
    # A support with a known last id is accepted here; the trainer checks the support's mass.
    known = (~finite).any(1) | (np.abs(masses - 1.0) <= MASS)
    inside &= known[:, None]
    sizes = inside.sum(1)
    return TokenSupports(
        _narrow(sizes, sizes.max(initial=0)), _narrow(rows[inside], rows.max(initial=0)), masses.astype(np.float32)
    )


def _narrow(values: Array, largest: int) -> Array:
    return values.astype(np.min_scalar_type(int(largest)))


NOTE = "offpolicy_support"
"""Key of a row's note in its extra fields."""


@dataclass(frozen=True)
class RowSupports:
    """The note of one row, as it was read.

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
    """The note of one row while it is sampled; it is pickled as the plain values of a ``RowSupports``."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._supports = TokenSupports.empty()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.finish().to_plain(),)

    def add(self, prompt: Sequence[int], sampled: Sequence[int], supports: TokenSupports) -> None:
        """Add the tokens of a further request of the row, made for another turn or after an aborted attempt.

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
    """Compute each token's part of its row's checksum; it depends on position, token, ids, their order and log-probs.

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
