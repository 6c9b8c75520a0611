"""Trainer's part of a recording: the directory, the card of the run, and the announcement of each update."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import live_path

from ..batch.plan import BatchSplit, SharedPlan, UpdateRows
from ..correction import CorrectionSpec
from ..fault_tolerance.checkpoints import CheckpointFolder, write_json
from ..fault_tolerance.redaction import HIDDEN, redact, redact_text
from .files import PRIVATE, PRIVATE_DIRECTORY, RecordingError
from .record_settings import FOREIGN, SECTION, RecordSettings, explain_foreign
from .recording import CARD, DELIVERY, PROOF, FileName, parse_name
from .schema import VERSION

logger = logging.getLogger("verl.offpolicy")

PATIENCE = 5.0
"""Seconds that a run waits at its end until the workers have written the last step."""
AFTER_FAILURE = 2.0
"""Seconds that a failing run waits at its end; its last update may never be complete."""
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
        """Add to an update's plan the data about this update that the recorders need.

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
        """Wait until the last step's files are visible on this machine, because workers are ended without notice.

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
        # Otherwise, rows that are recorded again would be counted twice.
        fix = "Fix: move the recording elsewhere, or set another directory. Nothing is recorded; training continues."
        gone = None
        with self._warning(f"the recording of step {first} and later cannot be removed", fix):
            files = self._list_files(first)
            for path in files:
                path.unlink(missing_ok=True)
            gone = len(files)
        if gone:
            logger.warning("%s: %d files from step %d on are recorded again.", self._directory, gone, first)
        return gone is not None
