"""Supports of a micro-batch's tokens, assigned to the tokens of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch.padding import Layout
from ..batch.weight_versions import read_extra_fields
from ..replay.batch_routes import TokenLayout
from .token_supports import NOTE, RowSupports, TokenSupports, hash_supports, read_note


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
        masses: (minimum, maximum) of mu's sum over known supports.
        unknown_mass: sum of mu over the ids returned for tokens of unknown support.
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
    masses: tuple[float, float]
    unknown_mass: float

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
    places, rows, within = [], [], []
    checksums, compared = [0] * len(notes), [False] * len(notes)
    parts = []
    for row, note in enumerate(notes):
        if note is None:
            continue
        own = note.list_places()
        length = offsets[row + 1] - offsets[row]
        there = int((own < length).sum())
        compared[row] = there == len(own)
        checksums[row] = note.checksum
        own = own[:there]
        within.append(own)
        places.append(own + offsets[row])
        rows.append(torch.full_like(own, row))
        parts.append(note.supports.cut(0, there))
    joined = TokenSupports.concatenate(parts)
    masses = [note.masses for note in notes if note is not None]
    has = joined.sizes > 0
    device = layout.offsets.device

    def put(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    none = torch.zeros(0, dtype=torch.int64)
    return BatchSupports(
        places=put(torch.cat([none, *places])),
        rows=put(torch.cat([none, *rows])),
        within=put(torch.cat([none, *within])),
        ids=put(torch.from_numpy(joined.pad())),
        log_probs=put(torch.from_numpy(joined.pad_log_probs())),
        sizes=put(torch.from_numpy(joined.sizes.astype(np.int64))),
        known=put(torch.from_numpy(has.nonzero()[0])),
        truncated=put(torch.from_numpy((has & (joined.sizes < vocabulary)).nonzero()[0])),
        unknown=put(torch.from_numpy((~has).nonzero()[0])),
        checksums=put(torch.tensor(checksums, dtype=torch.int64)),
        compared=put(torch.tensor(compared)),
        bytes=joined.bytes,
        masses=(min((each[0] for each in masses), default=1.0), max((each[1] for each in masses), default=1.0)),
        unknown_mass=sum(each[2] for each in masses),
    )
