"""A recorded run: a directory of steps, one file a step and rank, and a card that says what was run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import RecordingError, Step, read
from .rows import Rows, concatenated

CARD = "run.json"
"""What was run: ``correction``, ``fingerprint``, ``release``, ``path``, ``model``, ``config``."""
PROOF = "proof.json"
"""The proof of life: ``sentence``, ``step`` and ``live``, the metrics of ``offpolicy/live/``."""
_LARGEST_JSON = 64 * 2**20
_NAME = re.compile(r"step_(\d{8})\.rank_(\d{5})\.parquet")


def file_name(step: int, rank: int) -> str:
    """Of what ``rank`` recorded of ``step``."""
    return f"step_{step:08d}.rank_{rank:05d}.parquet"


def step_of(name: str) -> tuple[int, int] | None:
    """(step, rank) of a file's name; None for files of other kinds."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


class Recording:
    """Reads what ``offpolicy.record.dir`` was written.

    Args:
        directory: with at least one recorded step.

    Attributes:
        files: step -> its files, by rank.

    Raises:
        RecordingError: there is none.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.files: dict[int, list[Path]] = {}
        if not self.directory.is_dir():
            raise RecordingError(f"{self.directory}: no such directory. Give the one of offpolicy.record.dir.")
        try:
            paths = sorted(self.directory.iterdir())
        except OSError as error:
            raise RecordingError(f"{self.directory}: not readable ({error.strerror}). Mend its permissions.") from error
        for path in paths:
            if found := step_of(path.name):
                self.files.setdefault(found[0], []).append(path)
        if not self.files:
            raise RecordingError(
                f"{self.directory}: no recorded step in it. Give the directory of offpolicy.record.dir."
            )

    @property
    def steps(self) -> list[int]:
        """In ascending order."""
        return sorted(self.files)

    def parts(self, step: int) -> list[Step]:
        """What each rank recorded of ``step``.

        Raises:
            RecordingError: a file of it is damaged, or ranks recorded different corrections.
        """
        parts = [read(path) for path in self.files[step]]
        for path, part in zip(self.files[step], parts, strict=True):
            named = {(int(a), int(b)) for a, b in zip(part.rows.step, part.rows.rank, strict=True)}
            if named - {step_of(path.name)}:
                raise RecordingError(f"{path}: its rows are of other steps or ranks than its name. Remove the file.")
            if part.spec != parts[0].spec or part.reasons != parts[0].reasons:
                raise RecordingError(f"{path}: recorded under another correction than {self.files[step][0].name}.")
        return parts

    def step(self, step: int) -> Step:
        """``step``, of all ranks together."""
        parts = self.parts(step)
        return Step(concatenated([part.rows for part in parts]), parts[0].spec, parts[0].reasons)

    def __iter__(self) -> Iterator[Step]:
        """All steps in order, one in memory at a time."""
        return (self.step(step) for step in self.steps)

    def rows(self) -> Rows:
        """The rows of all steps."""
        return concatenated([step.rows for step in self])

    @property
    def card(self) -> Mapping[str, Any]:
        """What was run, see ``CARD``; empty where it was not written.

        Raises:
            RecordingError: it is not readable.
        """
        return read_json(self.directory / CARD)

    @property
    def proof(self) -> Mapping[str, Any]:
        """The proof of life, see ``PROOF``; empty where there is none.

        Raises:
            RecordingError: it is not readable.
        """
        return read_json(self.directory / PROOF)


def read_json(path: Path) -> Mapping[str, Any]:
    """A card or a proof; empty where there is none.

    Raises:
        RecordingError: it is not readable.
    """
    if not path.exists():
        return {}
    if not path.is_file() or path.stat().st_size > _LARGEST_JSON:
        raise RecordingError(f"{path}: no file, or larger than {_LARGEST_JSON} bytes. Remove it.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordingError(f"{path}: not readable as JSON ({error}). Remove it.") from error
    if not isinstance(value, dict):
        raise RecordingError(f"{path}: expected a JSON object. Remove it.")
    return value
