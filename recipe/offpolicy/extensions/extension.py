"""The extension interface: trainer-side hooks that do nothing by default, and a half that travels to the workers.

The order of a step: ``next_batch``, ``on_rollout``, then, around verl's estimator, ``shape_rewards``, ``estimate``,
``shape_advantages`` and ``on_advantages``, then in the workers ``wrap_loss`` and ``report``, and ``judge`` of what
these reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig
from torch import Tensor

from ..correction import Problem
from .batch_view import BatchView, PromptView

if TYPE_CHECKING:
    from .loss_rows import LossRows

BoundLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""A loss of verl's that takes (model_output, data, dp_group)."""


@dataclass(frozen=True)
class Advantages:
    """One batch's advantages, (n, T) each.

    Attributes:
        rewards: what verl's estimator saw.
        own: what it made of them.
        final: what goes to the workers.
    """

    rewards: Tensor
    own: Tensor
    final: Tensor


class WorkerExtension:
    """The half that travels to the workers by value; it has to be picklable and holds settings alone."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns of ``BatchView.put`` that are recorded and shown in the report -> what they are."""
        return {}

    def wrap_loss(self, base_loss: BoundLoss, actor_config: Any) -> BoundLoss:
        """Add a term beside or inside verl's policy loss.

        ``base_loss`` has to be called with the micro-batch as it comes, whose ``rollout_is_weights`` are the
        correction's weight x keep, and its loss has to be in the sum with a factor of 1: the proof demands verl's own
        gradient whole, and the term's beside it. Under ``correction=none`` there are no weights on the engine path.
        The loss is wrapped anew at each micro-batch.
        """
        return base_loss

    def report(self, rows: LossRows) -> Any:
        """Report on one micro-batch, in plain Python or as a dataclass of it; ``Extension.judge`` gets it."""
        return None


class Extension:
    """One capability beside the corrections, switched on by its section of the configuration.

    Args:
        section: its name in the configuration.
        settings: the values of the section, in plain Python.

    Raises:
        SpecError: a setting cannot be what was meant; the key begins with the section.
    """

    phase: ClassVar[str] = ""
    """The watchdog's name for the time that hooks take; empty: the section."""

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        self.section = section
        self.settings = dict(settings)

    # Before Ray starts --------------------------------------------------------------------------------------

    @property
    def meaning(self) -> str:
        """A description of the settings in a few words."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items() if not isinstance(value, Mapping))

    @property
    def replay_note(self) -> str:
        """A sentence on what a replay of the recorded run leaves out or takes as it was; empty: nothing."""
        return ""

    @property
    def reads_old_log_prob(self) -> bool:
        """True if pi_old is needed before the loss; then ``correction.proximal=auto`` is ``recompute``."""
        return False

    def configure(self, config: DictConfig) -> Sequence[str]:
        """Set keys of verl's, in place, such as an agent loop's class; returns a line on each."""
        return ()

    def problems(self, config: DictConfig) -> Sequence[Problem]:
        """Find what is wrong around the settings in the whole configuration; key, value, reason and fix."""
        return ()

    # In the trainer -----------------------------------------------------------------------------------------

    def begin(self, config: DictConfig) -> None:
        """Start with the run, in the trainer's process."""

    def end(self) -> None:
        """Release resources, such as threads; also called after a failure."""

    def load_prompts(self, loader: Any) -> Any:
        """Return the data loader of training prompts: verl's, which nothing has been read from, or another."""
        return loader

    def next_batch(self, prompts: PromptView) -> None:
        """See the prompts that are about to be sampled."""

    def on_rollout(self, batch: BatchView) -> None:
        """See a batch whose rewards are known and whose pi_old is not computed yet."""

    def shape_rewards(self, batch: BatchView, rewards: Tensor) -> Tensor | None:
        """Change the rewards that verl's estimator sees, (n, T); the raw ones are put back after it."""
        return None

    def estimate(self, batch: BatchView, rewards: Tensor) -> Tensor | None:
        """Compute advantages (n, T) in the place of verl's estimator; one extension at most."""
        return None

    def shape_advantages(self, batch: BatchView, advantages: Tensor) -> Tensor | None:
        """Change the estimator's advantages, (n, T)."""
        return None

    def on_advantages(self, batch: BatchView, advantages: Advantages) -> None:
        """See the advantages that go to the workers, after all extensions."""

    def worker(self) -> WorkerExtension | None:
        """Make the half that travels to the workers; None: there is none, and nothing is reported."""
        return None

    def judge(self, reports: Sequence[Any]) -> Mapping[str, float]:
        """Judge the reports of one update, one a micro-batch of every rank; metrics by their full names.

        Raises:
            LivenessError: what is configured was not seen to act; the run stops.
        """
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Return the step's metrics by their full names, such as ``opd/pass_rate``, to alarms and the logger."""
        return {}

    def validate(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run verl's validation, once or in rounds."""
        return run()

    def validation_metrics(
        self, sources: Sequence[Any], uids: Sequence[Any], values: Mapping[str, Sequence[Any]]
    ) -> Mapping[str, float]:
        """Compute metrics of one validation: data source, uid and verl's extra values of each sample."""
        return {}

    # Checkpoints --------------------------------------------------------------------------------------------

    @property
    def noted(self) -> Mapping[str, Any]:
        """Settings that have to be equal for a checkpoint to be resumed."""
        return self.settings

    def state(self, folder: Path) -> Mapping[str, Any]:
        """Return the state for a checkpoint, as JSON; larger state goes into files below ``folder``."""
        return {}

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore a checkpoint's ``state``."""
