"""The extension interface: an add-on that a section switches on, and its half that travels to the workers.

The order of a step: ``next_batch``, ``on_rollout``, then, around verl's estimator, ``shape_rewards``, ``estimate``,
``shape_advantages`` and ``on_advantages``, then in the workers ``wrap_loss`` and ``report``, and ``judge`` of what
these reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from torch import Tensor

from ..correction import Problem
from .add_on import AddOn, Advantages

if TYPE_CHECKING:
    from .batch_view import BatchView
    from .loss_rows import LossRows

__all__ = ["Advantages", "BoundLoss", "Extension", "WorkerExtension"]

BoundLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""A loss of verl's that takes (model_output, data, dp_group)."""


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


class Extension(AddOn):
    """One capability beside the corrections, switched on by its section of the configuration.

    Args:
        section: its name in the configuration.
        settings: the values of the section, in plain Python.

    Raises:
        SpecError: a setting cannot be what was meant; the key begins with the section.
    """

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

    # With the run -------------------------------------------------------------------------------------------

    def worker(self) -> WorkerExtension | None:
        """Make the half that travels to the workers; None: there is none, and nothing is reported."""
        return None

    @property
    def sent(self) -> Mapping[str, int] | None:
        """Hash of each row that the loss has to see, by its key in ``BatchView.keys``; None: no rows are compared.

        The reports' ``hashes`` are compared with them, less the rows that have left, before ``judge``.
        """
        return None

    def silence(self, batch: BatchView, rows: Tensor) -> None:
        """Update ``sent`` for ``rows``, (n,) bool, which stay in the loss with an advantage of 0."""

    @property
    def resumes(self) -> str | None:
        """The key because of which a resumed run needs ``state``; None: it need not be there."""
        return None

    @property
    def noted(self) -> Mapping[str, Any]:
        """Settings that have to be equal for a checkpoint to be resumed."""
        return self.settings
