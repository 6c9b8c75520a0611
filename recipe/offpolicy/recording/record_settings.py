"""Parsing and validation of the keys ``offpolicy.record``."""

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
from .files import MOST_REASONS, RecordingError
from .run_info import explain_foreign

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
    """Find invalid values of ``offpolicy.record``."""
    found = list(KEYS.find_problems(config))
    yield from found
    directory = OmegaConf.select(config, f"{SECTION}.dir") if not found else None
    if directory is None:
        return
    yield from _place(directory)
    try:
        if trouble := explain_foreign(str(Path.cwd() / directory), config):
            free = next(name for n in itertools.count(2) if not Path(name := f"{directory.rstrip('/')}_{n}").exists())
            yield _problem(f"{SECTION}.dir", directory, trouble, FOREIGN, set_to(f"{SECTION}.dir", free))
    except (RecordingError, OSError) as error:
        yield _misplaced(directory, f"{error}", "Set another directory.")
    if OmegaConf.select(config, _MU) is False:
        reason = "without the engine's log-probs, there is no mu to record."
        yield _problem(f"{SECTION}.dir", directory, reason, "", set_to(_MU, True))


def find_too_many_parts(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find out whether ``spec`` has more rejecting parts than a file has bits for; no problem without a recording."""
    values = KEYS.read(config)
    if not isinstance(values, Mapping) or values.get("dir") is None:
        return
    parts = len(spec.masks) + sum(weight.kind == "reject" for weight in spec.all_weights.values())
    if parts > MOST_REASONS:
        reason = f"{parts} parts of the correction can reject, but a recording distinguishes only {MOST_REASONS}."
        yield _misplaced(values["dir"], reason, f"Set {SECTION}.dir=null, or configure fewer masks.")


def _problem(key: str, value: Any, reason: str, fix: str, *overrides: str) -> Problem:
    return Problem(key, value, reason, fix, parts=(), overrides=overrides)


def _misplaced(directory: object, reason: str, fix: str) -> Problem:
    """Build the problem of a directory that cannot be created or written to; the user must choose another one."""
    return _problem(f"{SECTION}.dir", directory, reason, fix)


def _place(directory: str) -> Iterator[Problem]:
    """Check that this machine can create and write the directory."""
    path = Path.cwd() / directory
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        yield _misplaced(
            directory, f"{existing} is not a directory.", "Set another directory, or null for no recording."
        )
    elif not _writable(existing):
        fix = "Set another directory, fix the permissions of this one, or set null for no recording."
        yield _misplaced(directory, f"{existing} is not writable.", fix)


def _writable(folder: Path) -> bool:
    """Test whether the folder is writable by creating and removing a subfolder; permissions alone are not enough."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".offpolicy-"):
            return True
    except OSError:
        return False
