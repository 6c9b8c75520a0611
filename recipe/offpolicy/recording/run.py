"""The trainer's part of a recording: the keys ``offpolicy.record``, the directory, the card, and the plan of each
update."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_patches.execution_path import live_path

from ..batch.declared_keys import Key, Section, count, flag, number, read_shipped_defaults
from ..batch.plan import BatchSplit, SharedPlan, UpdateRows
from ..correction import CorrectionSpec, Problem
from ..correction.problem import set_to
from ..fault_tolerance.checkpoints import CheckpointFolder, write_json
from ..fault_tolerance.redaction import HIDDEN, redact, redact_text
from .files import MOST_REASONS, PRIVATE, PRIVATE_DIRECTORY, RecordingError
from .recording import CARD, DELIVERY, PROOF, FileName, parse_name, read_config, read_json
from .schema import VERSION

logger = logging.getLogger("verl.offpolicy")

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
    """Check whether ``spec`` has more rejecting parts than a file has bits; there is no problem without a recording."""
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
        # Even an unreadable tracker file shows that there was an earlier run.
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
    return "the directory contains the recording of another run, and this run does not resume a checkpoint of that run."


def _goes_on(card: Mapping[str, Any], config: DictConfig) -> bool:
    """Return True if this run resumes the card's run, or restarts a run that ended before its first checkpoint."""
    there = find_resumed_folder(config)
    # If there is no checkpoint although the card's run was configured to save some, it was interrupted early.
    saves = isinstance(every := read_config(card, "trainer.save_freq"), int) and every > 0
    if there is None and saves and OmegaConf.select(config, "trainer.resume_mode") == "auto":
        there = str(CheckpointFolder.from_config(config).path)
    known = card.get("checkpoints")
    return there is not None and isinstance(known, str) and os.path.realpath(known) == os.path.realpath(there)


PATIENCE = 5.0
"""Seconds that a run waits at its end until the workers have written the last step."""
AFTER_FAILURE = 2.0
"""Seconds that a failing run waits at its end, where its last update may never be complete."""
POLL = 0.05
"""Seconds between two checks during the wait."""
_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")


def build_card(
    config: DictConfig,
    spec: CorrectionSpec,
    shadows: Mapping[str, CorrectionSpec],
    extensions: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the card of a run.

    Args:
        extensions: description of each enabled section.

    Returns:
        ``schema``, ``started`` (UTC), ``correction``, ``fingerprint``, ``shadows``, ``release`` and ``path`` of verl,
        ``model``, ``sampling``, ``checkpoints`` and the resolved ``config``, without environment variables and secrets;
        ``extensions`` if there are any.
    """
    path = live_path(config)
    return {
        "schema": VERSION,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "correction": spec.to_mapping(),
        "fingerprint": spec.fingerprint(),
        "shadows": {name: shadow.to_mapping() for name, shadow in shadows.items()},
        "release": path.release,
        "path": str(path),
        "model": redact_text(str(OmegaConf.select(config, "actor_rollout_ref.model.path"))),
        "sampling": read_sampling(config),
        "checkpoints": str(CheckpointFolder.from_config(config).path),
        "config": redact(_plain(OmegaConf.to_container(config, resolve=True))),
        **({"extensions": redact(_plain(extensions))} if extensions else {}),
    }


def read_sampling(config: DictConfig) -> dict[str, Any]:
    """Describe how responses were sampled: engine, keys that are set, the engine's own keys, and the support."""
    sampling: dict[str, Any] = {"engine": OmegaConf.select(config, f"{_ROLLOUT}.name")}
    for name in _SAMPLING:
        for key in (f"{_ROLLOUT}.{name}", f"{_ENGINE}.{name}", f"{_ENGINE}.override_generation_config.{name}"):
            if (value := OmegaConf.select(config, key)) is not None:
                sampling[name] = value
    if OmegaConf.select(config, "correction.support") is not None:
        names = ("support", "support_unknown", "support_min_p")
        sampling |= {name: OmegaConf.select(config, f"correction.{name}") for name in names}
    return sampling


def _plain(value: Any) -> Any:
    """Convert to JSON values, without environment variables."""
    if isinstance(value, Mapping):
        return {str(key): HIDDEN if key == "env_vars" else _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    is_json = (
        value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_json else str(value)


class RunRecord:
    """The trainer's record of one run; it does nothing if recording is off.

    Args:
        config: composed and checked configuration.
        spec: the correction.
        shadows: shadow corrections, by name.
        extensions: description of each enabled section, for the card.

    Attributes:
        settings: settings of the recording; None if it is off.

    Raises:
        RecordingError: the directory contains another run's recording, or is not writable.
    """

    def __init__(
        self,
        config: DictConfig,
        spec: CorrectionSpec,
        shadows: Mapping[str, CorrectionSpec],
        extensions: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = RecordSettings.from_config(config)
        self._epochs = config.actor_rollout_ref.actor.ppo_epochs
        self._step: int | None = None
        self._last: int | None = None  # last update of a step with several updates
        self._updates = self._gradient_steps = self._ranks = 0
        self._ended = False
        if self.settings is None:
            return
        if trouble := explain_foreign(self.settings.dir, config):
            raise RecordingError(f"{SECTION}.dir={self.settings.dir}: {trouble} {FOREIGN}")
        try:
            self._directory.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            write_json(self._directory / CARD, build_card(config, spec, shadows, extensions), mode=PRIVATE)
        except OSError as error:
            reason = f"{SECTION}.dir={self.settings.dir}: {error.strerror}. Set another directory."
            raise RecordingError(reason) from error
        logger.info("recording goes to %s.", self._directory)

    def announce_update(
        self, plan: SharedPlan, *, rows: int, batch_split: Callable[[], BatchSplit], updates: int = 1
    ) -> SharedPlan:
        """Add the data that the recorders need to an update's plan.

        Args:
            rows: number of rows of the batch.
            batch_split: returns how verl will split the batch; called only if the update is recorded.
            updates: number of updates per step.
        """
        if self.settings is None or self._ended:
            return plan
        if self._step is None and not self._forget(plan.step):
            self._ended = True
            return plan
        if plan.step != self._step:
            self._step, self._updates, self._gradient_steps = plan.step, 0, 0
        dealt = batch_split()
        self._ranks = dealt.ranks
        on_rank, mini_batch = rows // dealt.ranks, max(dealt.mini_batch_rows // dealt.ranks, 1)
        update = UpdateRows(dealt.ranks, on_rank, mini_batch, self._updates, updates, self._gradient_steps)
        self._last = self._updates if updates > 1 else None
        self._updates += 1
        self._gradient_steps += math.ceil(on_rank / mini_batch) * self._epochs
        return replace(plan, update=update)

    def write_proof(self, step: int, sentence: str, live: Mapping[str, float]) -> None:
        """Write the liveness proof to the directory of the recording."""
        if self.settings is not None:
            with self._warning("the proof is not recorded"):
                content = {"step": step, "sentence": sentence, "live": dict(live)}
                write_json(self._directory / PROOF, content, mode=PRIVATE)

    def write_delivery(self, line: Mapping[str, Any]) -> None:
        """Append the result of comparing weights at one synchronisation: ``step``, ``verdict`` and further keys."""
        if self.settings is not None:
            opener = partial(os.open, mode=PRIVATE)
            with (
                self._warning("delivery is not recorded"),
                open(self._directory / DELIVERY, "a", opener=opener) as sink,
            ):
                sink.write(f"{json.dumps(line)}\n")

    def finish(self, patience: float = PATIENCE, pause: Callable[[float], object] = time.sleep) -> None:
        """Wait until the last step's files are visible on this machine, because workers are killed without notice.

        Args:
            patience: total number of seconds to pause, not counting the time that the checks take.
            pause: sleeps for the given seconds.
        """
        if self.settings is None or self._step is None or not self.settings.records(self._step):
            return
        with self._warning("the recording cannot be checked", "Fix the cause, or set another directory."):
            for _ in range(math.ceil(patience / POLL)):
                names = self._list_files(self._step).values()
                if sum((name.step, name.update) == (self._step, self._last) for name in names) >= self._ranks:
                    return
                pause(POLL)

    @contextlib.contextmanager
    def _warning(self, consequence: str, fix: str = "") -> Iterator[None]:
        """Log an OSError, its consequence and the fix; training continues."""
        try:
            yield
        except OSError as error:
            assert self.settings is not None
            logger.warning("%s.dir=%s: %s (%s). %s", SECTION, self.settings.dir, consequence, error.strerror, fix)

    @property
    def _directory(self) -> Path:
        assert self.settings is not None
        return Path(self.settings.dir)

    def _list_files(self, first: int) -> dict[Path, FileName]:
        """List the files of this step and of later ones."""
        names = {path: parse_name(path.name) for path in self._directory.iterdir()}
        return {path: name for path, name in names.items() if name is not None and name.step >= first}

    def _forget(self, first: int) -> bool:
        """Remove the files that were recorded after the checkpoint of a resumed run; return True if they are gone."""
        # Otherwise, rows that the resumed run records again would be counted twice.
        fix = (
            "Fix: move the recording elsewhere, or set another directory. Nothing is recorded, and training continues."
        )
        gone = None
        with self._warning(f"the recording of step {first} and later cannot be removed", fix):
            files = self._list_files(first)
            for path in files:
                path.unlink(missing_ok=True)
            gone = len(files)
        if gone:
            logger.warning("%s: %d files from step %d on are recorded again.", self._directory, gone, first)
        return gone is not None
