"""Calls the hooks of all add-ons in order, for the V0 and the V1 trainer; no other module calls hooks."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor

from ..batch.seals import find_difference
from ..fault_tolerance.checkpoints import RECORD, find_changes
from ..fault_tolerance.redaction import redact
from ..fault_tolerance.state_schema import refuse, restoring
from ..proof.verify import LivenessError
from .add_on import AddOn, Advantages, Extension, WorkerExtension, implements, load_extensions
from .batch_view import BatchView, PromptView

logger = logging.getLogger("verl.offpolicy")

_OF_ADVANTAGES = ("shape_rewards", "estimate", "shape_advantages", "on_advantages")
PATIENCE = 5
"""Number of updates without an effect before the first warning; the number doubles with each further warning."""
Phase = Callable[[str], AbstractContextManager[Any]]
"""Maps the name of a watchdog phase to a context manager that charges its time to that phase."""


class TrainerBatch(BatchView, Protocol):
    """The methods of a batch that ``AddOns`` needs but that extensions must not call."""

    def shaped(self, rewards: Tensor) -> AbstractContextManager[None]:
        """Let verl's estimator read these rewards (n, T) inside the context; then restore the raw rewards bitwise."""

    @property
    def advantages(self) -> Tensor:
        """The estimator's advantages, (n, T)."""

    def put_advantages(self, advantages: Tensor, *, returns: bool) -> None:
        """Replace the estimator's advantages, and optionally its returns, with these values."""


class AddOns:
    """The add-ons of one run, in the trainer's process; without add-ons, only the wrapped functions run.

    Args:
        extensions: extensions in the order of their hooks.
        own: other add-ons, outermost first; they precede the extensions.

    Attributes:
        unproved: maps each add-on's name to the reason why it was still unproved after the last update, or to None.
    """

    def __init__(self, extensions: Sequence[Extension] = (), own: Sequence[AddOn] = ()) -> None:
        self._extensions = tuple(extensions)
        self._all: tuple[AddOn, ...] = (*own, *extensions)
        self._phase: Phase = nullcontext
        self._prompts_seen = False
        self._rollout_seen = False
        self._advantages_seen = False
        self._judged: dict[str, float] = {}
        self.unproved: dict[str, str | None] = {}
        self._left: dict[str, str] = {}
        self._updates = 0

    @classmethod
    def from_config(cls, config: DictConfig, own: Sequence[AddOn] = ()) -> AddOns:
        """Create the enabled extensions, after ``own``."""
        return cls(load_extensions(config), own)

    def begin(self, config: DictConfig, phase: Phase = nullcontext) -> None:
        """Start all add-ons; ``phase`` opens a phase of the watchdog."""
        self._phase = phase
        self._each("begin", config)

    def end(self) -> None:
        """End all add-ons, even if one fails."""
        with contextlib.ExitStack() as stack:
            for add_on in self._all:
                stack.callback(add_on.end)

    def uses(self, *hooks: str) -> bool:
        """Return True if an add-on implements one of these hooks."""
        return any(self._users(hook) for hook in hooks)

    def _users(self, hook: str) -> tuple[AddOn, ...]:
        """Return the add-ons that implement a hook; batches are not read for the others."""
        return tuple(each for each in self._all if implements(each, hook))

    def _within(self, add_on: AddOn) -> AbstractContextManager[Any]:
        """Charge a hook's time to the add-on's watchdog phase."""
        name = add_on.phase or _section(add_on)
        return self._phase(name) if name else nullcontext()

    # Around methods of verl's trainer -----------------------------------------------------------------------

    def wrap(self, hook: str, run: Callable[..., Any], *more: Any) -> Callable[..., Any]:
        """Call the trainer's method ``run`` through a hook, which receives ``run``, its arguments and ``more``."""
        for add_on in reversed(self._users(hook)):
            run = partial(_call, getattr(add_on, hook), run, more)
        return run

    def replace(self, hook: str, value: Any) -> Any:
        """Pass a value, such as the rollout client, through one hook of all add-ons, innermost first."""
        for add_on in reversed(self._users(hook)):
            value = getattr(add_on, hook)(value)
        return value

    def engine_parts(self) -> list[Callable[[Any], object]]:
        """Collect the functions that add-ons install in the training engine."""
        return [part for add_on in reversed(self._all) if (part := add_on.engine_part()) is not None]

    def on_resumed(self) -> None:
        """Call ``on_resumed`` of all add-ons after verl has loaded a checkpoint."""
        self._each("on_resumed")

    def batch_flags(self) -> dict[str, Any]:
        """Collect the flags that are sent to the workers with a batch."""
        return _merge(self._each("batch_flags"))

    def before_update(self) -> None:
        """Let add-ons finish any work that an update would disturb."""
        self._each("before_update")

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        """Let add-ons remove their reports from the workers' metrics."""
        self._each("on_update", metrics, batch)

    def _each(self, hook: str, *args: Any) -> list[Any]:
        """Call ``hook`` of each add-on, in the add-on's own watchdog phase."""
        found = []
        for add_on in self._users(hook):
            with self._within(add_on):
                found.append(getattr(add_on, hook)(*args))
        return found

    # Extensions ---------------------------------------------------------------------------------------------

    def worker_halves(self) -> dict[str, WorkerExtension]:
        """Map the section of each extension that has a worker part to that part."""
        halves = {extension.section: extension.worker() for extension in self._extensions}
        return {section: half for section, half in halves.items() if half is not None}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Describe each section for a recording: ``meaning``, ``replay`` and the recorded ``columns``."""
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
        """Return the data loader of training prompts after all extensions' changes."""
        for add_on in self._users("load_prompts"):
            with self._within(add_on):
                loader = add_on.load_prompts(loader)
        return loader

    def next_batch(self, prompts: PromptView) -> None:
        """Pass the prompts to extensions before responses are sampled."""
        self._prompts_seen = True
        self._each("next_batch", prompts)

    def on_rollout(self, batch: BatchView) -> None:
        """Pass a batch to extensions before pi_old is computed."""
        self._rollout_seen = True
        self._each("on_rollout", batch)

    def compute_advantages(self, batch: TrainerBatch, estimator: Callable[[], None]) -> None:
        """Run verl's ``estimator`` between the hooks; its results are read through ``batch``."""
        if not self._rollout_seen:  # verl used mu as pi_old without calling the hook
            self.on_rollout(batch)
        self._rollout_seen, self._left = False, {}
        if self.uses(*_OF_ADVANTAGES):
            self._shape(batch, estimator)
        else:
            estimator()
        self._advantages_seen = True

    def _shape(self, batch: TrainerBatch, estimator: Callable[[], None]) -> None:
        raw = batch.scores
        rewards = self._change("shape_rewards", batch, raw, raw)
        with batch.shaped(rewards) if rewards is not raw else nullcontext():
            estimator()
        own = batch.advantages
        estimated = self._change("estimate", batch, own, rewards)
        if estimated is not own:
            if batch.silent is not None:
                estimated = estimated.masked_fill(batch.silent[:, None], 0.0)
            batch.put_advantages(estimated, returns=True)
        found = batch.advantages
        advantages = self._change("shape_advantages", batch, found, found)
        if advantages is not found:
            batch.put_advantages(advantages, returns=False)
        self._each("on_advantages", batch, Advantages(rewards, own, advantages))

    def _change(self, hook: str, batch: BatchView, values: Tensor, given: Tensor) -> Tensor:
        """Let all add-ons change ``values`` in turn; the hook ``estimate`` receives ``given`` instead.

        Raises:
            ValueError: a hook returned another shape, or values that are not finite.
        """
        for each in self._users(hook):
            with self._within(each):
                changed = getattr(each, hook)(batch, (given if hook == "estimate" else values).clone())
            if changed is None:
                continue
            returned = f"{_section(each)}: {hook} returned values"
            if changed.shape != values.shape:
                raise ValueError(f"{returned} of shape {tuple(changed.shape)} for rows of shape {tuple(values.shape)}.")
            if (lost := ~torch.isfinite(changed)).any():
                raise ValueError(f"{returned} that are not finite; the first is in row {int(lost.nonzero()[0, 0])}.")
            values = changed.to(given.dtype if hook == "estimate" else values.dtype)
        return values

    def take_out(self, batch: BatchView, why: str, *, masked: Collection[str], silenced: Collection[str] = ()) -> None:
        """Record the rows that are removed from the update between the advantages and the loss.

        Args:
            why: the reason, with the key that causes it.
            masked: keys of rows without a token in the loss.
            silenced: keys of rows that keep their tokens but have an advantage of 0.
        """
        self._left |= dict.fromkeys(masked, why)
        silent = torch.tensor([key in silenced for key in batch.keys], dtype=torch.bool)
        if silent.any():
            for extension in self._extensions:
                extension.silence(batch, silent)

    def judge(self, reports: Sequence[Mapping[str, Any]], epochs: int = 1) -> None:
        """Let each extension with a worker part judge the reports of one update.

        Args:
            reports: reports of each micro-batch, by section.
            epochs: number of times that the loss reads each row.

        Raises:
            LivenessError: a report is missing, the trainer did not call the hooks before sampling or around its
                estimator, or an extension stops the run.
        """
        self._judged = {}
        needy = [_section(each) for each in self._users("next_batch")]
        if needy and not self._prompts_seen:
            raise LivenessError(f"{', '.join(needy)}: verl's trainer did not call the hook that runs before sampling.")
        if self._extensions and not self._advantages_seen:
            sections = ", ".join(extension.section for extension in self._extensions)
            raise LivenessError(f"{sections}: verl's trainer did not call the hooks around its advantage estimator.")
        self._advantages_seen = False
        for extension in self._extensions:
            with self._within(extension):
                if extension.worker() is None:
                    continue
                found = [report[extension.section] for report in reports if extension.section in report]
                if len(found) < len(reports) or not found:
                    lost = f"{len(reports) - len(found)} of {len(reports)} micro-batches have no report"
                    reason = "Some code sets another loss in the workers, or drops the metrics of the loss."
                    raise LivenessError(f"{extension.section}: {lost} from the extension. {reason}")
                self._compare_rows(extension, found, epochs)
                self._judged |= extension.judge(found)
        self._left = {}
        self._say_unproved()

    def _say_unproved(self) -> None:
        """Warn at growing intervals about add-ons that are not known to have an effect."""
        self._updates += 1
        waited, rest = divmod(self._updates, PATIENCE)
        self.unproved = {each.proof_name or _section(each): each.unproved() for each in self._users("unproved")}
        for name, why in self.unproved.items():
            self._judged[f"offpolicy/live/{name}"] = float(why is None)
            if why is not None and not rest and waited & (waited - 1) == 0:
                logger.warning("%s is still unproved after %d updates: %s", name, self._updates, why)

    def _compare_rows(self, extension: Extension, reports: Sequence[Any], epochs: int) -> None:
        """Compare the rows that reached the loss with the rows that were sent and not removed from the update.

        Raises:
            LivenessError: the rows differ, or did not reach the loss exactly once per epoch.
        """
        if (sent := extension.sent) is None:
            return
        if missing := {name: None for report in reports if report.hashes is None for name in report.missing}:
            reason = "Some code selects or converts the columns that go to the workers."
            raise LivenessError(f"{extension.section}: {', '.join(missing)} did not reach the loss. {reason}")
        seen = itertools.chain.from_iterable(report.hashes for report in reports)
        if (difference := find_difference(sent, seen, self._left, epochs)) is not None:
            lost = f"the loss did not receive the sequences that were sent to it. {difference}"
            reason = "Some code drops, repeats, changes or mixes up sequences between the trainer and the loss."
            raise LivenessError(f"{extension.section}: {lost}. {reason}")

    def metrics(self) -> dict[str, float]:
        """Collect the metrics of the last update, by full name."""
        return self._judged | _merge(self._each("metrics"))

    # Validation and checkpoints ------------------------------------------------------------------------------

    def validate(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run verl's validation inside the hooks of all add-ons."""
        for add_on in reversed(self._users("validate")):
            run = partial(add_on.validate, trainer, run)
        return run()

    def validation_metrics(
        self, sources: Sequence[Any], uids: Sequence[Any], values: Mapping[str, Sequence[Any]]
    ) -> dict[str, float]:
        """Compute all extensions' metrics of one validation."""
        return _merge(self._each("validation_metrics", sources, uids, values))

    @property
    def rate_limit_state(self) -> Mapping[str, Any] | None:
        """State of the staleness limit, to be saved in a checkpoint; None if there is no limit."""
        states = (add_on.rate_limit_state for add_on in self._all)
        return next((state for state in states if state is not None), None)

    def state(self, folder: Path) -> dict[str, Any]:
        """Return each section's state for a checkpoint, with the settings that produced it."""
        return {
            extension.section: {
                "settings": redact(dict(extension.noted)),
                "state": dict(extension.state(folder / extension.section)),
            }
            for extension in self._extensions
        }

    def differences(self, states: Mapping[str, Any], *sections: str) -> list[str]:
        """List the keys whose values differ between this run and the checkpoint with ``states``; show both values."""
        noted = {section: redact(each["settings"]) for section, each in states.items()}
        now = {extension.section: redact(dict(extension.noted)) for extension in self._extensions}
        return [
            line
            for section in sorted(sections or noted.keys() | now.keys())
            for line in find_changes(noted.get(section, {}), now.get(section, {}), section)
        ]

    def restore(self, states: Mapping[str, Any], folder: Path) -> None:
        """Restore the ``states`` of a checkpoint; an extension without a saved state starts from scratch.

        Raises:
            CheckpointError: a state is missing or invalid.
        """
        record = folder.parent / RECORD
        for extension in self._extensions:
            section = extension.section
            if section not in states:
                continue
            state, same = states[section]["state"], not self.differences({section: states[section]}, section)
            if extension.resumes and same and not state:
                refuse(record, f"extensions.{section}.state", state, f"{extension.resumes} continues from it")
            with restoring(lambda: record, f"extensions.{section}.state"):
                extension.restore(state, folder / section)

    def list_dependents(self) -> list[str]:
        """List the keys of this run that continue from a checkpoint's state."""
        keys = [extension.resumes for extension in self._extensions if extension.resumes]
        return keys + ["offpolicy.staleness.eta"] * (self.rate_limit_state is not None)


def _call(hook: Callable[..., Any], run: Callable[..., Any], more: Sequence[Any], *given: Any) -> Any:
    return hook(run, *given, *more)


def _merge(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for each in found for name, value in each.items()}


def _section(add_on: AddOn) -> str:
    return add_on.section if isinstance(add_on, Extension) else ""
