"""Trainer's part of a recording: owns the directory and its card, and announces each update to the workers."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ..batch.plan import BatchSplit, SharedPlan, UpdateRows
from ..correction import CorrectionSpec
from ..fault_tolerance.checkpoints import write_json
from .files import PRIVATE, PRIVATE_DIRECTORY, RecordingError
from .record_settings import FOREIGN, SECTION, RecordSettings
from .recording import CARD, DELIVERY, PROOF, parse_step, parse_update
from .run_info import build_card, explain_foreign

logger = logging.getLogger("verl.offpolicy")

PATIENCE = 5.0
"""Seconds that a run waits at its end until the workers have written the last step."""
AFTER_FAILURE = 2.0
"""Seconds that a failing run waits at its end; its last update may never be complete."""
POLL = 0.05
"""Seconds between two checks during the wait."""


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
            raise RecordingError(
                f"{SECTION}.dir={self.settings.dir}: {error.strerror}. Set another directory."
            ) from error
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
        if self.settings is None:
            return
        try:
            content = {"step": step, "sentence": sentence, "live": dict(live)}
            write_json(self._directory / PROOF, content, mode=PRIVATE)
        except OSError as error:
            logger.warning("%s.dir=%s: the proof is not recorded (%s).", SECTION, self.settings.dir, error.strerror)

    def write_delivery(self, line: Mapping[str, Any]) -> None:
        """Append the result of comparing weights at one synchronisation: ``step``, ``verdict`` and further keys."""
        if self.settings is None:
            return
        try:
            with open(self._directory / DELIVERY, "a", opener=partial(os.open, mode=PRIVATE)) as sink:
                sink.write(f"{json.dumps(line)}\n")
        except OSError as error:
            logger.warning("%s.dir=%s: delivery is not recorded (%s).", SECTION, self.settings.dir, error.strerror)

    def finish(self, patience: float = PATIENCE, pause: Callable[[float], object] = time.sleep) -> None:
        """Wait until the last step's files are visible on this machine, because workers are ended without notice.

        Args:
            patience: total number of seconds to pause, not counting the time that the checks take.
            pause: sleeps for the given seconds.
        """
        if self.settings is None or self._step is None or not self.settings.records(self._step):
            return
        try:
            for _ in range(math.ceil(patience / POLL)):
                if self._written() >= self._ranks:
                    return
                pause(POLL)
        except OSError as error:
            logger.warning(
                "%s.dir=%s: the recording cannot be checked (%s). Fix the cause, or set another directory.",
                SECTION,
                self.settings.dir,
                error.strerror,
            )

    @property
    def _directory(self) -> Path:
        assert self.settings is not None
        return Path(self.settings.dir)

    def _written(self) -> int:
        """Count the files of the last update that have been written."""
        assert self._step is not None
        return sum(parse_update(path.name) == self._last for path in self._files(self._step, self._step))

    def _files(self, first: int, last: int) -> list[Path]:
        """List the files of these steps."""
        steps = ((path, parse_step(path.name)) for path in self._directory.iterdir())
        return [path for path, found in steps if found is not None and first <= found[0] <= last]

    def _forget(self, first: int) -> bool:
        """Remove the files that were recorded after the checkpoint of a resumed run; return True if they are gone."""
        assert self.settings is not None
        try:
            gone = self._files(first, sys.maxsize)
            for path in gone:
                path.unlink(missing_ok=True)
        except OSError as error:
            # Otherwise, rows that are recorded again would be counted twice.
            logger.warning(
                "%s.dir=%s: the recording of step %d and later cannot be removed (%s). Fix: move the recording "
                "elsewhere, or set another directory. Nothing is recorded; training continues.",
                SECTION,
                self.settings.dir,
                first,
                error.strerror,
            )
            return False
        if gone:
            logger.warning("%s: %d files from step %d on are recorded again.", self._directory, len(gone), first)
        return True
