"""A recorded run is a directory with one file per update and rank, and with a card that describes the run.

Under ``proximal=bypass``, the recorded column of pi_old is mu; under ``loglinear``, it is a mixture of mu and pi. The
distance of this column from mu therefore says nothing about the engines. At the first gradient step of a training step,
pi is still computed with the weights from the step's start, so pi is read instead of pi_old. At later gradient steps,
pi has changed and cannot replace pi_old.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..correction.correction_parts import OF_THE_TRAINER
from .files import ASIDE, RecordingError, Step, build_unreadable_error, count_rows, read
from .schema import Rows, concatenate

CARD = "run.json"
"""File that describes the run: ``correction``, ``fingerprint``, ``release``, ``path``, ``model``, ``config``."""
PROOF = "proof.json"
"""File of the liveness proof: ``sentence``, ``step`` and ``live``, the metrics of ``offpolicy/live/``."""
DELIVERY = "delivery.jsonl"
"""File with one line for each synchronisation at which weights were compared, see ``run.RunRecord.write_delivery``."""
PIECE = 16 * 2**20
"""Total size in bytes of the files that are read together if a step may be split; this is about 1.4 million tokens."""
_LARGEST_JSON = 64 * 2**20
_NAME = re.compile(r"step_(\d{8})(?:\.update_(\d{4}))?\.rank_(\d{5})\.parquet")


def file_name(step: int, rank: int, update: int | None = None) -> str:
    """Return the name of a rank's file for ``step`` or, if a step has several updates, for one ``update`` (from 0)."""
    part = "" if update is None else f".update_{update:04d}"
    return f"step_{step:08d}{part}.rank_{rank:05d}.parquet"


class FileName(NamedTuple):
    """The parts of a file's name; ``update`` is None for the file of a whole step."""

    step: int
    rank: int
    update: int | None


def parse_name(name: str) -> FileName | None:
    """Parse a file's name; None for files of other kinds."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    return FileName(int(match[1]), int(match[3]), None if match[2] is None else int(match[2]))


Correction = tuple[Mapping[str, Any], tuple[str, ...]]
"""Key of a correction: the ``spec`` and the ``reasons`` of a step."""


class Recording:
    """Reader of the directory that ``offpolicy.record.dir`` names.

    Args:
        directory: directory with at least one recorded step.

    Attributes:
        files: step -> its files, by update and rank.
        largest: limit, in bytes, on the files that are read together, see ``pieces``.

    Raises:
        RecordingError: there is no recorded step.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.largest = math.inf
        self.files: dict[int, list[Path]] = {}
        if not self.directory.is_dir():
            raise RecordingError(
                f"{self.directory}: there is no such directory. Pass the directory that offpolicy.record.dir names."
            )
        try:
            paths = sorted(self.directory.iterdir())
        except OSError as error:
            raise build_unreadable_error(self.directory, error) from error
        for path in paths:
            if found := parse_name(path.name):
                self.files.setdefault(found.step, []).append(path)
        if not self.files:
            fix = "Pass the directory that offpolicy.record.dir names."
            raise RecordingError(f"{self.directory}: there is no recorded step in this directory. {fix}")

    @property
    def steps(self) -> list[int]:
        """Recorded steps in ascending order."""
        return sorted(self.files)

    def only(self, *steps: int) -> Recording:
        """Return a reader for only these steps."""
        one = copy.copy(self)
        one.files = {step: self.files[step] for step in steps}
        return one

    def in_pieces(self, largest: float = PIECE) -> Recording:
        """Return a reader that yields a large step in several ``pieces`` to limit memory use."""
        one = copy.copy(self)
        one.largest = largest
        return one

    def choose_steps(self, steps: tuple[int, int | None] | None) -> list[int]:
        """Return the recorded steps in [first, last]; all steps for None, and no upper limit if ``last`` is None.

        Raises:
            RecordingError: no such step was recorded.
        """
        first, last = steps or (self.steps[0], None)
        chosen = [step for step in self.steps if first <= step and (last is None or step <= last)]
        if not chosen:
            asked = f"from {first} on" if last is None else f"from {first} to {last}"
            there = f"the recorded steps are {self.steps[0]} to {self.steps[-1]}"
            raise RecordingError(f"{self.directory}: no step {asked} is recorded; {there}.")
        return chosen

    def part(self, step: int, place: int) -> Step:
        """Read one of the ``files`` of ``step``, chosen by its index.

        Raises:
            RecordingError: the file is damaged.
        """
        path = self.files[step][place]
        part = read(path)
        name = parse_name(path.name)
        if name is None or (part.rows.step != name.step).any() or (part.rows.rank != name.rank).any():
            raise RecordingError(
                f"{path}: the rows belong to a different step or rank from the one in the file's name. {ASIDE}"
            )
        return part

    def parts(self, step: int) -> list[Step]:
        """Read the record of each rank and update of ``step``, in the order of ``files``.

        Raises:
            RecordingError: see ``iterate_parts``.
        """
        return list(self.iterate_parts(step))

    def iterate_parts(self, step: int) -> Iterator[Step]:
        """Yield the record of each rank and update of ``step`` in the order of ``files``, with one in memory at a time.

        Raises:
            RecordingError: a file is damaged, or ranks recorded different corrections.
        """
        files = self.files[step]
        updates = [name.update for path in files if (name := parse_name(path.name)) is not None]
        if None in updates and set(updates) != {None}:
            raise RecordingError(
                f"{files[0]}: this file of a whole step is mixed with files of single updates. Move the files of one "
                "kind out of the directory."
            )
        first: dict[int | None, tuple[Path, Correction]] = {}
        for place, (path, update) in enumerate(zip(files, updates, strict=True)):
            part = self.part(step, place)
            alongside, of = first.setdefault(update, (path, _correction(part)))
            if _correction(part) != of:
                raise RecordingError(
                    f"{path}: this file was recorded under a different correction from {alongside.name}."
                )
            yield part

    def pieces(self, step: int) -> Iterator[list[Step]]:
        """Yield ``step`` in pieces: single files, or successive files of at most ``largest`` bytes in total.

        A piece contains one Step per correction that was active in it, in the order of the updates.

        Raises:
            RecordingError: see ``iterate_parts``.
        """
        group: list[Step] = []
        size = 0
        for path, part in zip(self.files[step], self.iterate_parts(step), strict=True):
            own = path.stat().st_size
            if group and size + own > self.largest:
                yield list(join_alike(_drain(group)))
                size = 0
            group.append(part)
            size += own
        yield list(join_alike(_drain(group)))

    def corrections(self, step: int) -> list[Step]:
        """Read ``step`` of all ranks together: one Step per active correction, in the order of the updates.

        Raises:
            RecordingError: see ``iterate_parts``.
        """
        return list(join_alike(self.iterate_parts(step)))

    def step(self, step: int) -> Step:
        """Read ``step`` of all ranks and updates together.

        Raises:
            RecordingError: see ``iterate_parts``; or several corrections were active in the step (use ``corrections``).
        """
        found = self.corrections(step)
        if len(found) > 1:
            fix = f"Read them separately: Recording.corrections({step})."
            raise RecordingError(f"{self.directory}: {len(found)} corrections were active in step {step}. {fix}")
        return found[0]

    def __iter__(self) -> Iterator[Step]:
        """Yield all steps in order, one piece in memory at a time; one ``Step`` per piece and correction."""
        return (found for step in self.steps for piece in self.pieces(step) for found in piece)

    def count_rows(self) -> int:
        """Count the rows of all steps from their files' metadata.

        Raises:
            RecordingError: a file is damaged.
        """
        return sum(count_rows(path) for files in self.files.values() for path in files)

    def rows(self) -> Rows:
        """Read the rows of all steps."""
        return concatenate([step.rows for step in self])

    @property
    def card(self) -> Mapping[str, Any]:
        """The description of the run, see ``CARD``; empty if it was not written.

        Raises:
            RecordingError: the file is not readable.
        """
        return read_json(self.directory / CARD)

    @property
    def proof(self) -> Mapping[str, Any]:
        """The liveness proof, see ``PROOF``; empty if there is none.

        Raises:
            RecordingError: the file is not readable.
        """
        return read_json(self.directory / PROOF)

    @property
    def delivery(self) -> list[Mapping[str, Any]]:
        """The lines of ``DELIVERY``; empty if there are none.

        Raises:
            RecordingError: the lines are not readable.
        """
        path = self.directory / DELIVERY
        try:
            lines = path.read_text().splitlines() if path.exists() else []
            return [json.loads(line) for line in lines]
        except OSError as error:
            raise build_unreadable_error(path, error) from error
        except ValueError as error:
            raise RecordingError(f"{path}: expected one JSON object per line ({error}). Remove the file.") from error


def read_config(card: Mapping[str, Any], key: str) -> Any:
    """Read a dotted key of the configuration in a card; None if it is missing."""
    node: Any = card.get("config")
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def read_extensions(card: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read a card's description of each extension: ``meaning``, ``replay``, and the meaning of its ``columns``.

    The result is empty for a run without extensions, and for older recordings.
    """
    found = card.get("extensions")
    sections = found.items() if isinstance(found, Mapping) else ()
    return {
        str(section): {
            "meaning": str(each.get("meaning") or ""),
            "replay": str(each.get("replay") or ""),
            "columns": dict(columns) if isinstance(columns := each.get("columns"), Mapping) else {},
        }
        for section, each in sections
        if isinstance(each, Mapping)
    }


def _correction(step: Step) -> Correction:
    return step.spec, step.reasons


def join_alike(parts: Iterable[Step], when: Callable[[Step], bool] = lambda part: True) -> Iterator[Step]:
    """Yield successive parts, joining those that have the same correction.

    Args:
        when: returns True if a part's correction needs joining; other parts are yielded one by one.
    """
    group: list[Step] = []
    for part in parts:
        if group and _correction(part) != _correction(group[0]):
            yield _join(group)
        if when(part):
            group.append(part)
        else:
            yield part
    if group:
        yield _join(group)


def _join(group: list[Step]) -> Step:
    """Join parts that have the same correction, and empty ``group`` to free the memory of its rows."""
    correction = _correction(group[0])
    return Step(concatenate([part.rows for part in _drain(group)]), *correction)


def _drain(group: list[Step]) -> list[Step]:
    parts, group[:] = list(group), []
    return parts


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a card or a proof; empty if there is none.

    Raises:
        RecordingError: the file is not readable.
    """
    try:
        if not path.exists():
            return {}
        if not path.is_file() or path.stat().st_size > _LARGEST_JSON:
            raise RecordingError(f"{path}: this is not a file, or it is larger than {_LARGEST_JSON} bytes. {ASIDE}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecordingError:
        raise
    except OSError as error:
        raise build_unreadable_error(path, error) from error
    except (ValueError, RecursionError) as error:
        fix = "Repair the file, or move it out of the directory."
        raise RecordingError(f"{path} is not readable as JSON ({error}). {fix}") from error
    if not isinstance(value, dict):
        raise RecordingError(f"{path}: expected a JSON object. {ASIDE}")
    return value


def find_scored_rows(step: Step) -> NDArray[np.bool_]:
    """Return a (N,) bool mask of the rows whose log pi_old under the trainer's own weights is known."""
    if step.spec.get("proximal", "recompute") in OF_THE_TRAINER:
        return np.ones(len(step.rows), dtype=bool)
    return step.rows.mini_batch == 0


def get_trainers_pi_old(step: Step) -> NDArray[np.float32]:
    """Return log pi_old of each token under the trainer's own weights, (M,) in nats; NaN where unknown."""
    rows = step.rows
    if step.spec.get("proximal", "recompute") in OF_THE_TRAINER:
        return rows.old_log_prob
    return np.where(find_scored_rows(step)[rows.row_of_token], rows.log_prob, np.float32(np.nan))
