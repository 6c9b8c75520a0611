"""Rows of micro-batches, packed on their device, and the writer of one rank's rows, which observes the size budget."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .files import PARTIAL, PRIVATE_DIRECTORY, SUFFIX, OverLimit, write
from .recording import file_name, parse_name
from .run import SECTION, RecordSettings
from .schema import EXTENSION_PREFIX, UNKNOWN_VERSION, Rows, compute_offsets, concatenate, spread_versions

_FLOATS = ("rollout_log_prob", "old_log_prob", "log_prob", "advantages", "weight")
_MOST_TURNS = 2**15 - 1


@dataclass(frozen=True)
class Seen:
    """Tensors of one micro-batch as the loss read them; see ``schema`` for the meaning of each.

    Attributes:
        response_ids, response_mask, rollout_log_prob, old_log_prob, log_prob, advantages, weight: (B, T).
        valid: (B, T) bool, the response mask without the tokens that the correction excludes.
        rejected: name of a rejecting part -> (B, T) bool; at most 32.
        uids: uid of each row: B strings, or (B, L) uint8 with zero-padded UTF-8; None if unknown.
        reward: (B,), or None.
        versions: oldest and newest version of each row, (B,) each, or None.
        token_versions: (B, T) integers, or None if versions are known per row.
        extensions: column of an extension -> (B, T).
        prompts: concatenated token ids, (P,), and the (B,) lengths of the prompts; None to omit them.
    """

    response_ids: Tensor
    response_mask: Tensor
    rollout_log_prob: Tensor
    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    weight: Tensor
    valid: Tensor
    rejected: Mapping[str, Tensor]
    uids: Sequence[str] | Tensor | None = None
    reward: Tensor | None = None
    versions: tuple[Tensor, Tensor] | None = None
    token_versions: Tensor | None = None
    prompts: tuple[Tensor, Tensor] | None = None
    extensions: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Packed:
    """Rows that are being transferred to the host: columns concatenated in ``buffer``, in the order of ``layout``.

    Attributes:
        buffer: (bytes,) uint8 on the host; complete as soon as ``ready`` has occurred.
        layout: column -> (dtype on the host, elements).
        uids: uids of all rows of the micro-batch, if they are strings.
        ready: a CUDA event, or None.
    """

    buffer: Tensor
    layout: Mapping[str, tuple[np.dtype[Any], int]]
    uids: Sequence[str] | None
    ready: Any = None

    @property
    def rows(self) -> int:
        """Number of packed rows."""
        return self.layout["span"][1]

    @property
    def nbytes(self) -> int:
        """Host memory in bytes."""
        return self.buffer.numel()


@torch.no_grad()
def pack(seen: Seen, chosen: Tensor | None = None) -> Packed:
    """Pack the rows in ``chosen``, (B,) bool, that have a valid token; None chooses all such rows.

    A packed row extends from the row's first token to its last valid token.
    """
    mask = seen.response_mask.bool()
    width = mask.shape[1]
    wanted = mask.any(-1) if chosen is None else mask.any(-1) & chosen.to(mask.device)
    rows = wanted.nonzero().squeeze(-1)
    mask = mask[rows]
    place = torch.arange(width, device=mask.device)
    span = torch.where(mask, place + 1, 0).amax(-1) if len(rows) else rows
    index = (place < span[:, None]).flatten().nonzero().squeeze(-1)

    def tokens(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor[rows].flatten()[index].to(dtype)

    columns = {
        "span": span.to(torch.int32),
        "wanted": wanted.to(torch.uint8),
        "response_ids": tokens(seen.response_ids, torch.int32),
        "response_mask": mask.flatten()[index].to(torch.uint8),
        "rejected_by": tokens(_bits(seen), torch.int32),
        **{name: tokens(getattr(seen, name), torch.float32) for name in _FLOATS},
        **{name: tokens(column, torch.float32) for name, column in seen.extensions.items()},
    }
    if isinstance(seen.uids, Tensor):
        columns["uids"] = seen.uids.to(mask.device)[rows].flatten()
    if seen.reward is not None:
        columns["reward"] = seen.reward.to(mask.device)[rows].float()
    if seen.versions is not None:
        oldest, newest = (each.to(mask.device, torch.int64)[rows] for each in seen.versions)
        columns |= {"oldest_version": oldest, "newest_version": newest}
    if seen.token_versions is not None:
        columns["version"] = tokens(seen.token_versions, torch.int32)
    if seen.prompts is not None:
        ids, lengths = (each.to(mask.device) for each in seen.prompts)
        columns["prompt_ids"] = ids[wanted.repeat_interleave(lengths)].to(torch.int32)
        columns["prompt_span"] = lengths[rows].to(torch.int32)
    uids = None if isinstance(seen.uids, Tensor) else seen.uids
    return _moved(columns, uids, mask.device)


def unpack(packed: Packed, *, step: int, rank: int, mini_batch: int) -> Rows:
    """Unpack the rows on the host, after they have arrived."""
    if packed.ready is not None:
        packed.ready.synchronize()
    # The buffer is copied, because pinned memory is scarce and rows may wait for a long time.
    flat = packed.buffer.numpy().copy()
    columns: dict[str, NDArray[Any]] = {}
    start = 0
    for name, (dtype, count) in packed.layout.items():
        end = start + count * dtype.itemsize
        columns[name] = flat[start:end].view(dtype)
        start = end
    rows = packed.rows
    mask = columns["response_mask"].astype(bool)
    offsets = compute_offsets(columns["span"])
    unknown = np.full(rows, UNKNOWN_VERSION, dtype=np.int64)
    oldest, newest = (columns.get(f"{name}_version", unknown) for name in ("oldest", "newest"))
    by_row = spread_versions(oldest, newest, mask, offsets)
    return Rows(
        step=np.full(rows, step, dtype=np.int64),
        rank=np.full(rows, rank, dtype=np.int32),
        mini_batch=np.full(rows, mini_batch, dtype=np.int32),
        uid=_uids(packed, columns, rows),
        reward=columns.get("reward", np.full(rows, np.nan, dtype=np.float32)),
        oldest_version=oldest,
        newest_version=newest,
        # Every row has a token, so no sum is empty.
        length=np.add.reduceat(mask, offsets[:-1], dtype=np.int32) if rows else np.zeros(0, dtype=np.int32),
        offsets=offsets,
        response_ids=columns["response_ids"],
        response_mask=mask,
        rejected_by=columns["rejected_by"].view(np.uint32),
        turn=number_turns(mask, offsets),
        version=columns.get("version", by_row),
        prompt_offsets=compute_offsets(columns.get("prompt_span", np.zeros(rows, dtype=np.int32))),
        prompt_ids=columns.get("prompt_ids", np.zeros(0, dtype=np.int32)),
        extensions={name: columns[name] for name in sorted(columns) if name.startswith(EXTENSION_PREFIX)},
        **{name: columns[name] for name in _FLOATS},
    )


def number_turns(mask: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int16]:
    """Number the turns from 0 in each row, where a turn is a run of True in the mask; -1 where the mask is False.

    Args:
        mask: (M,) bool, the tokens of all rows.
        offsets: (N + 1,); each row has at least one token.
    """
    opens = mask.copy()
    opens[1:] &= ~mask[:-1]
    starts = offsets[:-1]
    opens[starts] = mask[starts]
    number = np.cumsum(opens)
    before: NDArray[np.int64] = np.repeat(number[starts] - opens[starts], np.diff(offsets))
    return np.where(mask, np.minimum(number - before - 1, _MOST_TURNS), -1).astype(np.int16)


def _bits(seen: Seen) -> Tensor:
    """Pack rejections into bits, (B, T) int32: bit i is set where the i-th of ``rejected`` rejects a valid token."""
    bits = torch.zeros_like(seen.valid, dtype=torch.int32)
    for i, drop in enumerate(seen.rejected.values()):
        # In int32, the highest bit is the sign.
        bits |= (drop & seen.valid).to(torch.int32) << i
    return bits


def _moved(columns: Mapping[str, Tensor], uids: Sequence[str] | None, device: torch.device) -> Packed:
    # The widest types come first, so that each column is aligned.
    ordered = sorted(columns.items(), key=lambda item: -item[1].element_size())
    flat = torch.cat([tensor.contiguous().view(torch.uint8) for _, tensor in ordered])
    layout = {name: (_find_dtype(tensor), tensor.numel()) for name, tensor in ordered}
    if device.type != "cuda":
        return Packed(flat.cpu(), layout, uids)
    host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return Packed(host, layout, uids, ready)


def _uids(packed: Packed, columns: Mapping[str, NDArray[Any]], rows: int) -> NDArray[np.object_]:
    uids = np.full(rows, "", dtype=object)
    if packed.uids is not None:
        uids[:] = [str(packed.uids[row]) for row in columns["wanted"].nonzero()[0]]
    elif "uids" in columns and rows:
        uids[:] = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in columns["uids"].reshape(rows, -1)]
    return uids


def _find_dtype(tensor: Tensor) -> np.dtype[Any]:
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype


@dataclass(frozen=True)
class Item:
    """Rows of one micro-batch, with the metadata of their file.

    Attributes:
        update: index of the update within its step; None if the step has only one update.
        packed: None if the rows were dropped.
        last: whether these rows complete the file.
    """

    step: int
    update: int | None
    mini_batch: int
    packed: Packed | None
    spec: Mapping[str, Any]
    reasons: tuple[str, ...]
    last: bool


@dataclass
class Outcome:
    """Results of items that were written or dropped.

    Attributes:
        released: bytes of rows that no longer wait to be written.
        dropped_rows: number of rows that will not be written.
        written: bytes of files that were written.
    """

    released: int = 0
    dropped_rows: int = 0
    written: int = 0


class StepWriter:
    """Writes an update when it is complete, or when the next update begins.

    Args:
        settings: settings of the recording.
        rank: data-parallel rank.
        ranks: number of ranks that share the directory.

    Attributes:
        outcome: accumulated results; the reader of this attribute must replace it with an empty ``Outcome``.
    """

    def __init__(self, settings: RecordSettings, *, rank: int, ranks: int) -> None:
        self.outcome = Outcome()
        self._settings, self._rank = settings, rank
        self._limit = settings.max_bytes / ranks
        self._directory = Path(settings.dir)
        # The first item, without its rows, of the update that is being collected; its rows; and their size in bytes.
        self._open: Item | None = None
        self._rows: list[Rows] = []
        self._held = 0
        self._sizes: dict[str, int] | None = None

    def add(self, item: Item) -> None:
        """Add rows; this may write a file.

        Raises:
            OSError: see ``files.write``.
            OverLimit: the budget is used up.
        """
        if self._open is not None and (self._open.step, self._open.update) != (item.step, item.update):
            self.close()
        self._open = self._open or replace(item, packed=None)
        if item.packed is not None:
            self._held += item.packed.nbytes
            self._rows.append(unpack(item.packed, step=item.step, rank=self._rank, mini_batch=item.mini_batch))
        if item.last:
            self.close()

    def drop(self, item: Item) -> None:
        """Count rows as dropped."""
        if item.packed is not None:
            self.outcome.released += item.packed.nbytes
            self.outcome.dropped_rows += item.packed.rows

    def close(self) -> None:
        """Write the open update, if there is one, whether it is complete or not; see ``add``."""
        opened, rows, held = self._open, self._rows, self._held
        self._open, self._rows, self._held = None, [], 0
        lost = sum(map(len, rows))
        try:
            if opened is not None and lost:
                self._write(opened, rows)
                lost = 0
        finally:
            self.outcome.released += held
            self.outcome.dropped_rows += lost

    def why(self, error: Exception) -> str:
        """Explain an error and its fix, in sentences that name the key and its value."""
        settings = self._settings
        if isinstance(error, OverLimit):
            return (
                f"{SECTION}.max_bytes={settings.max_bytes:g}: rank {self._rank} has used up its share of "
                f"{self._limit:g} bytes. Fix: raise the limit, or record less by setting "
                f"{SECTION}.every={10 * settings.every} or {SECTION}.share={settings.share / 10:g}."
            )
        if isinstance(error, OSError):
            what = os.strerror(error.errno) if error.errno else str(error).split("\n", 1)[0]
            return f"{SECTION}.dir={settings.dir}: {what}. Fix: free space there, or set another directory."
        return (
            f"{SECTION}.dir={settings.dir}: rank {self._rank} cannot record ({type(error).__name__}: {error}). "
            f"Fix: set {SECTION}.dir=null to turn recording off."
        )

    def _write(self, opened: Item, rows: list[Rows]) -> None:
        if self._sizes is None:
            self._sizes = self._prepare()
        name = file_name(opened.step, self._rank, opened.update)
        limit = self._limit - sum(size for other, size in self._sizes.items() if other != name)
        self._sizes[name] = write(self._directory / name, concatenate(rows), opened.spec, opened.reasons, limit=limit)
        self.outcome.written += self._sizes[name]

    def _prepare(self) -> dict[str, int]:
        """Map the names of the files that this rank wrote before the resume to their sizes in bytes."""
        self._directory.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        sizes = {}
        for path in self._directory.iterdir():
            found = parse_name(path.with_suffix(SUFFIX).name)
            if found is None or found.rank != self._rank:
                continue
            if path.suffix == PARTIAL:
                path.unlink()  # left by a process that was killed while writing
            elif path.suffix == SUFFIX:
                sizes[path.name] = path.stat().st_size
        return sizes
