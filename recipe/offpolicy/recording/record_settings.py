"""The keys ``offpolicy.record``, and the check that a run may record into their directory."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from ..batch.declared_keys import Key, Section, count, flag, number, read_shipped_defaults
from ..correction import CorrectionSpec, Problem
from ..correction.problem import set_to
from ..fault_tolerance.checkpoints import CheckpointFolder
from .files import MOST_REASONS, RecordingError
from .recording import CARD, parse_name, read_config, read_json

SECTION = "offpolicy.record"
FOREIGN = "Set another directory, or move the existing recording elsewhere."
"""Fix suggested for a directory that contains another run's recording."""
_MU = "actor_rollout_ref.rollout.calculate_log_probs"


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a recording, sent by value to every worker.

    Attributes:
        dir: absolute path of the directory; each node writes to its own directory with this path.
        every: interval between recorded steps; the first step is always recorded.
        share: share of the prompts to record, in (0, 1]; either all or none of a prompt's rows are recorded.
        prompts: whether to record the prompts' token ids.
        max_bytes: size limit of the directory; each data-parallel rank may use an equal share.
        max_waiting_bytes: size limit of the rows that wait to be written on each rank; further rows are dropped.
        without_replay: whether to also record log pi_old under the trainer's own expert routes, in addition to log
            pi_old under replayed routes.
    """

    dir: str
    every: int
    share: float
    prompts: bool
    max_bytes: float
    max_waiting_bytes: float
    without_replay: bool

    @classmethod
    def at(cls, dir: str, **changes: Any) -> RecordSettings:
        """Build the shipped settings with these changes, for a recording in ``dir``."""
        return cls(**{**read_shipped_defaults("record"), **changes, "dir": dir})

    @classmethod
    def from_config(cls, config: DictConfig) -> RecordSettings | None:
        """Read the settings of a checked configuration; None if nothing is recorded."""
        values = KEYS.read(config)
        if not isinstance(values, Mapping) or values.get("dir") is None:
            return None
        return cls.at(**{**values, "dir": str(Path.cwd() / str(values["dir"]))})

    def records(self, step: int) -> bool:
        """Return True if ``step``, from 1, is recorded."""
        return (step - 1) % self.every == 0


def resolve_dir(config: DictConfig) -> None:
    """Make ``offpolicy.record.dir`` absolute in place, because workers may have a different working directory."""
    directory = OmegaConf.select(config, f"{SECTION}.dir")
    if isinstance(directory, str) and directory.strip():  # an empty string is rejected; it is not the working directory
        with open_dict(config):
            config.offpolicy.record.dir = str(Path.cwd() / directory)


_DIR = ("dir", ...)
KEYS = Section(
    SECTION,
    read_shipped_defaults("record"),
    {
        "dir": Key(
            lambda value: value is None or (isinstance(value, str) and value.strip() != ""), "a directory, or null"
        ),
        "every": count("a number of steps, 1 or more", read_with=_DIR),
        "share": number("a share of the prompts, above 0 and at most 1", above=0, most=1, read_with=_DIR),
        "prompts": flag(read_with=_DIR),
        "max_bytes": number("a number of bytes above 0", above=0, read_with=_DIR),
        "max_waiting_bytes": number("a number of bytes above 0", above=0, read_with=_DIR),
        "without_replay": flag(read_with=_DIR),
    },
)


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find invalid values of ``offpolicy.record``, and directories that cannot be used."""
    if found := list(KEYS.find_problems(config)):
        yield from found
        return
    if (directory := OmegaConf.select(config, f"{SECTION}.dir")) is None:
        return
    path = Path.cwd() / directory
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        fix = "Set another directory, or null for no recording."
        yield _problem(directory, f"{existing} is not a directory.", fix)
    elif not _writable(existing):
        fix = "Set another directory, fix the permissions of this one, or set null for no recording."
        yield _problem(directory, f"{existing} is not writable.", fix)
    try:
        if trouble := explain_foreign(str(path), config):
            free = next(name for n in itertools.count(2) if not Path(name := f"{directory.rstrip('/')}_{n}").exists())
            yield _problem(directory, trouble, FOREIGN, set_to(f"{SECTION}.dir", free))
    except (RecordingError, OSError) as error:
        yield _problem(directory, f"{error}", "Set another directory.")
    if OmegaConf.select(config, _MU) is False:
        yield _problem(directory, "without the engine's log-probs, there is no mu to record.", "", set_to(_MU, True))


def find_too_many_parts(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find out whether ``spec`` has more rejecting parts than a file has bits for; no problem without a recording."""
    values = KEYS.read(config)
    if not isinstance(values, Mapping) or values.get("dir") is None:
        return
    parts = len(spec.masks) + sum(weight.kind == "reject" for weight in spec.all_weights.values())
    if parts > MOST_REASONS:
        reason = f"{parts} parts of the correction can reject, but a recording distinguishes only {MOST_REASONS}."
        yield _problem(values["dir"], reason, f"Set {SECTION}.dir=null, or configure fewer masks.")


def _problem(directory: object, reason: str, fix: str, *overrides: str) -> Problem:
    return Problem(f"{SECTION}.dir", directory, reason, fix, parts=(), overrides=overrides)


def _writable(folder: Path) -> bool:
    """Test whether the folder is writable by creating and removing a subfolder; permissions alone are not enough."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".offpolicy-"):
            return True
    except OSError:
        return False


def find_resumed_folder(config: DictConfig) -> str | None:
    """Return the directory whose checkpoints the run will resume; None for a new run."""
    mode = OmegaConf.select(config, "trainer.resume_mode")
    if mode == "resume_path":
        return str((Path.cwd() / str(config.trainer.resume_from_path)).parent)
    folder = CheckpointFolder.from_config(config)
    try:
        return str(folder.path) if mode == "auto" and folder.read_tracked_step() is not None else None
    except ValueError:
        # A tracker that cannot be read still belongs to an earlier run.
        return str(folder.path)


def explain_foreign(directory: str, config: DictConfig) -> str | None:
    """Explain why a run may not record into ``directory``; None if it may.

    Raises:
        RecordingError: the directory's card is not readable.
    """
    path = Path(directory)
    if not path.is_dir():
        return None
    card = read_json(path / CARD)
    if _goes_on(card, config) if card else not any(parse_name(each.name) for each in path.iterdir()):
        return None
    return "the directory holds the recording of another run, and this run resumes no checkpoint of that run."


def _goes_on(card: Mapping[str, Any], config: DictConfig) -> bool:
    """Return True if this run resumes the card's run, or restarts a run that ended before its first checkpoint."""
    there = find_resumed_folder(config)
    # If there is no checkpoint although the card's run was configured to save some, it was interrupted early.
    saves = isinstance(every := read_config(card, "trainer.save_freq"), int) and every > 0
    if there is None and saves and OmegaConf.select(config, "trainer.resume_mode") == "auto":
        there = str(CheckpointFolder.from_config(config).path)
    known = card.get("checkpoints")
    return there is not None and isinstance(known, str) and os.path.realpath(known) == os.path.realpath(there)
