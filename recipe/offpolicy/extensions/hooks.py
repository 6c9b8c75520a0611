"""The one place that calls the hooks of extensions, in their order, for the V0 and the V1 trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor

from ..fault_tolerance.checkpoints import find_changes
from ..fault_tolerance.redaction import redact
from ..proof.verify import LivenessError
from .batch_view import BatchView, PromptView
from .extension import Advantages, Extension, WorkerExtension
from .registry import load_extensions

Phase = Callable[[str], AbstractContextManager[Any]]
"""Makes the time inside count as a phase of the watchdog's."""


class TrainerBatch(BatchView, Protocol):
    """The part of a batch that the hooks need and extensions do not get."""

    def shaped(self, rewards: Tensor) -> AbstractContextManager[None]:
        """Show verl's estimator these rewards (n, T) within the context; restore the raw ones after it, to the bit."""

    @property
    def advantages(self) -> Tensor:
        """(n, T), of the estimator."""

    def put_advantages(self, advantages: Tensor, *, returns: bool) -> None:
        """Replace the estimator's advantages, and its returns by the same."""


class ExtensionHooks:
    """The extensions of one run, in the trainer's process; without any, each call does nothing.

    Args:
        extensions: in the order of their hooks.
        phase: of the watchdog.
    """

    def __init__(self, extensions: Sequence[Extension] = (), phase: Phase = nullcontext) -> None:
        self._extensions = tuple(extensions)
        self._phase = phase
        self._prompts_seen = False
        self._rollout_seen = False
        self._advantages_seen = False
        self._judged: dict[str, float] = {}

    @classmethod
    def begin(cls, config: DictConfig, phase: Phase = nullcontext) -> ExtensionHooks:
        """Create the extensions that are on and start them."""
        hooks = cls(load_extensions(config), phase)
        for extension in hooks._extensions:
            with hooks._within(extension):
                extension.begin(config)
        return hooks

    def end(self) -> None:
        """End all extensions, also where one fails."""
        with contextlib.ExitStack() as stack:
            for extension in self._extensions:
                stack.callback(extension.end)

    def __bool__(self) -> bool:
        return bool(self._extensions)

    def _within(self, extension: Extension) -> AbstractContextManager[Any]:
        """Count the time of a hook as the extension's watchdog phase."""
        return self._phase(extension.phase or extension.section)

    def worker_halves(self) -> dict[str, WorkerExtension]:
        """Return, by section, the worker half of each extension that has one."""
        halves = {extension.section: extension.worker() for extension in self._extensions}
        return {section: half for section, half in halves.items() if half is not None}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Describe each section for a recording: ``meaning``, ``replay`` and ``columns``, which are recorded."""
        halves = self.worker_halves()
        return {
            extension.section: {
                "meaning": extension.meaning,
                "replay": extension.replay_note,
                "columns": dict(halves[extension.section].columns) if extension.section in halves else {},
            }
            for extension in self._extensions
        }

    def load_prompts(self, loader: Any) -> Any:
        """Return the data loader of training prompts, as extensions change it."""
        for extension in self._extensions:
            with self._within(extension):
                loader = extension.load_prompts(loader)
        return loader

    # Of a step ----------------------------------------------------------------------------------------------

    def next_batch(self, prompts: PromptView) -> None:
        """Let extensions see the prompts that are about to be sampled."""
        self._prompts_seen = True
        for extension in self._extensions:
            with self._within(extension):
                extension.next_batch(prompts)

    def on_rollout(self, batch: BatchView) -> None:
        """Let extensions see a batch before pi_old is computed."""
        self._rollout_seen = True
        for extension in self._extensions:
            with self._within(extension):
                extension.on_rollout(batch)

    def compute_advantages(self, batch: TrainerBatch, estimator: Callable[[], None]) -> None:
        """Run verl's ``estimator`` with the hooks around it; what it changes is read through ``batch``."""
        if not self:
            estimator()
            return
        if not self._rollout_seen:  # verl took mu for pi_old without asking us
            self.on_rollout(batch)
        self._rollout_seen = False
        raw = batch.scores
        rewards = raw
        for extension in self._extensions:
            with self._within(extension):
                rewards = _changed(extension.shape_rewards(batch, rewards.clone()), rewards, extension, "shape_rewards")
        with batch.shaped(rewards) if rewards is not raw else nullcontext():
            estimator()
        own = found = batch.advantages
        for extension in self._extensions:
            with self._within(extension):
                estimated = extension.estimate(batch, rewards.clone())
                if estimated is not None:
                    advantages = _changed(estimated, rewards, extension, "estimate")
                    if batch.silent is not None:
                        advantages = advantages.masked_fill(batch.silent[:, None], 0.0)
                    batch.put_advantages(advantages, returns=True)
                    found = batch.advantages
        advantages = found
        for extension in self._extensions:
            with self._within(extension):
                shaped = extension.shape_advantages(batch, advantages.clone())
                advantages = _changed(shaped, advantages, extension, "shape_advantages")
        if advantages is not found:
            batch.put_advantages(advantages, returns=False)
        for extension in self._extensions:
            with self._within(extension):
                extension.on_advantages(batch, Advantages(rewards, own, advantages))
        self._advantages_seen = True

    def judge(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Let each extension with a worker half judge the reports of one update.

        Args:
            reports: of each micro-batch, by section.

        Raises:
            LivenessError: one is missing, the trainer went past the hooks in front of sampling or around its estimator,
                or an extension stops the run.
        """
        self._judged = {}
        needy = [each.section for each in self._extensions if type(each).next_batch is not Extension.next_batch]
        if needy and not self._prompts_seen:
            raise LivenessError(f"{', '.join(needy)}: verl's trainer went past the hook in front of sampling.")
        if self and not self._advantages_seen:
            sections = ", ".join(extension.section for extension in self._extensions)
            raise LivenessError(f"{sections}: verl's trainer went past the hooks around its advantage estimator.")
        self._advantages_seen = False
        for extension in self._extensions:
            with self._within(extension):
                if extension.worker() is None:
                    continue
                found = [report[extension.section] for report in reports if extension.section in report]
                if len(found) < len(reports) or not found:
                    raise LivenessError(
                        f"{extension.section}: {len(reports) - len(found)} of {len(reports)} micro-batches came "
                        f"without the report of the extension, so that it did not run there. Something hands the "
                        f"workers another loss, or drops its metrics."
                    )
                self._judged |= extension.judge(found)

    def metrics(self) -> dict[str, float]:
        """Collect the metrics of the last update, by full names."""
        found = dict(self._judged)
        for extension in self._extensions:
            with self._within(extension):
                found |= extension.metrics()
        return found

    # Validation and checkpoints ------------------------------------------------------------------------------

    def validate(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run verl's validation inside the hooks of all, the first extension outermost."""
        for extension in reversed(self._extensions):
            run = _validation(extension, trainer, run)
        return run()

    def validation_metrics(
        self, sources: Sequence[Any], uids: Sequence[Any], values: Mapping[str, Sequence[Any]]
    ) -> dict[str, float]:
        """Compute all extensions' metrics of one validation."""
        found: dict[str, float] = {}
        for extension in self._extensions:
            with self._within(extension):
                found |= extension.validation_metrics(sources, uids, values)
        return found

    def state(self, folder: Path) -> dict[str, Any]:
        """Return each section's state for a checkpoint, with the settings that it was made under."""
        return {
            extension.section: {
                "settings": redact(dict(extension.noted)),
                "state": dict(extension.state(folder / extension.section)),
            }
            for extension in self._extensions
        }

    def differences(self, states: Mapping[str, Any]) -> list[str]:
        """List the keys, with both values, in which this run differs from the checkpoint with ``states``."""
        noted = {section: redact(each["settings"]) for section, each in states.items()}
        now = {extension.section: redact(dict(extension.noted)) for extension in self._extensions}
        return [
            line
            for section in sorted(noted.keys() | now.keys())
            for line in find_changes(noted.get(section, {}), now.get(section, {}), section)
        ]

    def restore(self, states: Mapping[str, Any], folder: Path) -> None:
        """Restore the ``states`` of a checkpoint; an extension that was off then begins anew."""
        for extension in self._extensions:
            if extension.section in states:
                extension.restore(states[extension.section]["state"], folder / extension.section)


def _validation(
    extension: Extension, trainer: Any, run: Callable[[], dict[str, float]]
) -> Callable[[], dict[str, float]]:
    return lambda: extension.validate(trainer, run)


def _changed(given: Tensor | None, before: Tensor, extension: Extension, hook: str) -> Tensor:
    """Return a hook's result after checking it, or ``before`` where it gave none.

    Raises:
        ValueError: it has another shape, or values that are not finite.
    """
    if given is None:
        return before
    if given.shape != before.shape:
        raise ValueError(
            f"{extension.section}: {hook} returned {tuple(given.shape)} values for rows of {tuple(before.shape)}."
        )
    lost = ~torch.isfinite(given)
    if lost.any():
        row = int(lost.nonzero()[0, 0])
        raise ValueError(f"{extension.section}: {hook} returned values that are not finite, in row {row} first.")
    return given.to(before.dtype)
