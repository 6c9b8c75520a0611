"""``offpolicy.record``: what is recorded, where to, and how much of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from ..correction import CorrectionSpec
from .card import FIX, foreign
from .files import MOST_REASONS, RecordingError

SECTION = "offpolicy.record"
_MU = "actor_rollout_ref.rollout.calculate_log_probs"


@dataclass(frozen=True)
class RecordSettings:
    """By value to every worker.

    Attributes:
        dir: absolute directory; each node writes to the one of this name that it sees.
        every: steps from one recorded step to the next; the first step is recorded.
        share: of the prompts, whose rows are recorded all or none; in (0, 1].
        prompts: record the prompts' token ids.
        max_bytes: that the directory may hold; each data-parallel rank gets the same part of it.
        max_waiting_bytes: of rows that wait to be written, on each rank; more are left out.
    """

    dir: str
    every: int = 1
    share: float = 1.0
    prompts: bool = True
    max_bytes: float = 10e9
    max_waiting_bytes: float = 1e9

    @classmethod
    def from_config(cls, config: DictConfig) -> RecordSettings | None:
        """The settings of a checked configuration; None where nothing is to be recorded."""
        values = _section(config)
        if not isinstance(values, Mapping) or values.get("dir") is None:
            return None
        return cls(**{**values, "dir": str(Path.cwd() / str(values["dir"]))})

    def records(self, step: int) -> bool:
        """Whether ``step``, from 1, is one to record."""
        return (step - 1) % self.every == 0


def resolve_dir(config: DictConfig) -> None:
    """Make ``offpolicy.record.dir`` absolute, in place: workers may have another working directory."""
    directory = OmegaConf.select(config, f"{SECTION}.dir")
    if isinstance(directory, str):
        with open_dict(config):
            config.offpolicy.record.dir = str(Path.cwd() / directory)


def problems(config: DictConfig) -> Iterator[tuple[str, object, str, str]]:
    """What is wrong with ``offpolicy.record``, as (key, value, reason, fix)."""
    values = _section(config)
    if values is None:
        return
    if not isinstance(values, Mapping):
        yield SECTION, values, "not the keys of a recording.", f"Set {SECTION}.dir=PATH."
        return
    known = [field.name for field in fields(RecordSettings)]
    for name, value in values.items():
        if name not in known:
            yield f"{SECTION}.{name}", value, f"unknown key; known are {', '.join(known)}.", f"Remove {SECTION}.{name}."
        elif name in _WANTED and not _WANTED[name][0](value):
            yield (
                f"{SECTION}.{name}",
                value,
                f"expected {_WANTED[name][1]}.",
                f"Set {SECTION}.{name}={_WANTED[name][2]}.",
            )
    directory = values.get("dir")
    if directory is None:
        return
    if not isinstance(directory, str) or not directory:
        yield f"{SECTION}.dir", directory, "not a directory.", f"Set {SECTION}.dir=PATH, or null for no recording."
        return
    yield from _place(directory)
    try:
        if trouble := foreign(str(Path.cwd() / directory), config):
            yield f"{SECTION}.dir", directory, trouble, FIX
    except RecordingError as error:
        yield f"{SECTION}.dir", directory, str(error), ""
    if OmegaConf.select(config, _MU) is False:
        yield (
            f"{SECTION}.dir",
            directory,
            "without the engine's log-probs there is no mu to record.",
            f"Set {_MU}=true.",
        )


def too_many_parts(config: DictConfig, spec: CorrectionSpec) -> Iterator[tuple[str, object, str, str]]:
    """More parts of ``spec`` that can reject than a file has bits for, as ``problems``; nothing without a recording."""
    values = _section(config)
    if not isinstance(values, Mapping) or values.get("dir") is None:
        return
    parts = len(spec.masks) + (spec.weight is not None and spec.weight.kind == "reject")
    if parts > MOST_REASONS:
        yield (
            f"{SECTION}.dir",
            values["dir"],
            f"{parts} parts of the correction can reject, and a recording tells {MOST_REASONS} apart.",
            f"Set {SECTION}.dir=null, or give fewer masks.",
        )


def _place(directory: str) -> Iterator[tuple[str, object, str, str]]:
    """Whether this machine can write there; nothing is made."""
    path = Path.cwd() / directory
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        yield f"{SECTION}.dir", directory, f"{existing} is no directory.", "Give another."
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{SECTION}.dir", directory, f"{existing} cannot be written.", "Give another, or mend its permissions."


def _section(config: DictConfig) -> Any:
    node = OmegaConf.select(config, SECTION, default=None)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_WANTED: Mapping[str, tuple[Any, str, str]] = {
    "every": (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1, "a number of steps, 1 or more", "1"),
    "share": (lambda v: _number(v) and 0 < v <= 1, "a share of the prompts, above 0 and at most 1", "1.0"),
    "prompts": (lambda v: isinstance(v, bool), "true or false", "true"),
    "max_bytes": (lambda v: _number(v) and v > 0, "a number of bytes above 0", "10e9"),
    "max_waiting_bytes": (lambda v: _number(v) and v > 0, "a number of bytes above 0", "1e9"),
}
