"""Writer of one rank's rows: it collects rows by update, and writes them within the size budget."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import PARTIAL, PRIVATE_DIRECTORY, SUFFIX, OverLimit, write
from .pack import Packed, unpack
from .record_settings import SECTION, RecordSettings
from .recording import file_name, parse_step
from .schema import Rows, concatenate


@dataclass(frozen=True)
class Item:
    """Rows of one micro-batch, with the metadata of their file.

    Attributes:
        update: update of its step; None if the step makes only one.
        packed: None if the rows were dropped.
        last: these rows complete the file.
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
    """Results of written and dropped items.

    Attributes:
        released: bytes of rows that no longer wait.
        dropped_rows: number of rows that will not be written.
        written: bytes of files.
    """

    released: int = 0
    dropped_rows: int = 0
    written: int = 0


@dataclass
class _Open:
    """The update whose rows are being collected, and their size in bytes."""

    step: int
    update: int | None
    spec: Mapping[str, Any]
    reasons: tuple[str, ...]
    rows: list[Rows] = field(default_factory=list)
    held: int = 0


class StepWriter:
    """Writes an update when it is complete, or when the next one begins.

    Args:
        settings: settings of the recording.
        rank: data-parallel rank.
        ranks: number of ranks that share the directory.

    Attributes:
        outcome: accumulated results; the reader of this attribute replaces it by an empty ``Outcome``.
    """

    def __init__(self, settings: RecordSettings, *, rank: int, ranks: int) -> None:
        self.outcome = Outcome()
        self._settings = settings
        self._rank = rank
        self._limit = settings.max_bytes / ranks
        self._directory = Path(settings.dir)
        self._open: _Open | None = None
        self._sizes: dict[str, int] | None = None

    def add(self, item: Item) -> None:
        """Add rows; may write a file.

        Raises:
            OSError: see ``files.write``.
            OverLimit: the budget is used up.
        """
        if self._open is not None and (self._open.step, self._open.update) != (item.step, item.update):
            self.close()
        if self._open is None:
            self._open = _Open(item.step, item.update, item.spec, item.reasons)
        if item.packed is not None:
            self._open.held += item.packed.nbytes
            self._open.rows.append(unpack(item.packed, step=item.step, rank=self._rank, mini_batch=item.mini_batch))
        if item.last:
            self.close()

    def drop(self, item: Item) -> None:
        """Count rows as dropped."""
        if item.packed is not None:
            self.outcome.released += item.packed.nbytes
            self.outcome.dropped_rows += item.packed.rows

    def close(self) -> None:
        """Write the open update, if any, complete or not; see ``add``."""
        opened, self._open = self._open, None
        if opened is None:
            return
        lost = sum(map(len, opened.rows))
        try:
            if lost:
                self._write(opened)
                lost = 0
        finally:
            self.outcome.released += opened.held
            self.outcome.dropped_rows += lost

    def why(self, error: Exception) -> str:
        """Explain an error and its fix, in sentences that name key and value."""
        settings = self._settings
        if isinstance(error, OverLimit):
            return (
                f"{SECTION}.max_bytes={settings.max_bytes:g}: rank {self._rank} has filled its part of "
                f"{self._limit:g} bytes. Fix: raise the limit, or record less by setting "
                f"{SECTION}.every={10 * settings.every} or "
                f"{SECTION}.share={settings.share / 10:g}."
            )
        if isinstance(error, OSError):
            what = os.strerror(error.errno) if error.errno else str(error).split("\n", 1)[0]
            return f"{SECTION}.dir={settings.dir}: {what}. Fix: free space there, or set another directory."
        return (
            f"{SECTION}.dir={settings.dir}: rank {self._rank} cannot record ({type(error).__name__}: {error}). "
            f"Fix: set {SECTION}.dir=null to turn recording off."
        )

    def _write(self, opened: _Open) -> None:
        if self._sizes is None:
            self._sizes = self._prepare()
        name = file_name(opened.step, self._rank, opened.update)
        used = sum(size for other, size in self._sizes.items() if other != name)
        path = self._directory / name
        size = write(path, concatenate(opened.rows), opened.spec, opened.reasons, limit=self._limit - used)
        self._sizes[name] = size
        self.outcome.written += size

    def _prepare(self) -> dict[str, int]:
        """Map the names of this rank's files from before the resume to their sizes in bytes."""
        self._directory.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        sizes = {}
        for path in self._directory.iterdir():
            found = parse_step(path.with_suffix(SUFFIX).name)
            if found is None or found[1] != self._rank:
                continue
            if path.suffix == PARTIAL:
                path.unlink()  # left by a process that was killed while writing
            elif path.suffix == SUFFIX:
                sizes[path.name] = path.stat().st_size
        return sizes
