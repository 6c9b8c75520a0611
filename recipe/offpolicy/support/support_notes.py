"""The client's note with the supports of a row's sampled tokens, sent in the row's extra fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..replay.batch_routes import count_shared, hash_tokens
from .token_supports import TokenSupports

NOTE = "offpolicy_support"
"""Key of a row's note in its extra fields."""
_NONE = np.zeros(0, np.float32)


@dataclass(frozen=True)
class RowSupports:
    """The note of one row, as read.

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
            sampled: ids that the request sampled.
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
    # An id of -1 adds nothing.
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
