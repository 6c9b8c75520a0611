"""The extension interface: an add-on that a section enables, and its part that is sent to the workers.

The order of a step: ``next_batch``, ``on_rollout``, then, around verl's estimator, ``shape_rewards``, ``estimate``,
``shape_advantages`` and ``on_advantages``, then in the workers ``wrap_loss`` and ``report``, and finally ``judge`` of
their reports.
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
"""A loss of verl, called with (model_output, data, dp_group)."""


class WorkerExtension:
    """The part that is sent to the workers by value; it must be picklable and hold only settings."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns of ``BatchView.put`` that are recorded and shown in the report -> their meaning."""
        return {}

    def wrap_loss(self, base_loss: BoundLoss, actor_config: Any) -> BoundLoss:
        """Add a term next to or inside verl's policy loss.

        ``base_loss`` must be called with the unchanged micro-batch, whose ``rollout_is_weights`` are the correction's
        weight * keep, and its loss must enter the sum with factor 1: the proof expects verl's whole gradient plus the
        term's. Under ``correction=none`` there are no weights on the engine path. The loss is wrapped again for each
        micro-batch.
        """
        return base_loss

    def report(self, rows: LossRows) -> Any:
        """Report on one micro-batch, as plain Python or a dataclass of it, for ``Extension.judge``."""
        return None


class Extension(AddOn):
    """One capability in addition to the corrections, enabled by its section of the configuration.

    Args:
        section: its name in the configuration.
        settings: the values of the section, in plain Python.

    Raises:
        SpecError: a setting is invalid; the key begins with the section.
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
        """A sentence on what a replay of the recorded run omits or keeps unchanged; empty: nothing."""
        return ""

    @property
    def replaces_estimator(self) -> bool:
        """True if ``estimate`` returns advantages; only one extension of a run may do so."""
        return type(self).estimate is not Extension.estimate

    @property
    def reads_old_log_prob(self) -> bool:
        """True if pi_old is needed before the loss; then ``correction.proximal=auto`` is ``recompute``."""
        return False

    def configure(self, config: DictConfig) -> Sequence[str]:
        """Set verl's keys in place, such as an agent loop's class; returns one line per key."""
        return ()

    def problems(self, config: DictConfig) -> Sequence[Problem]:
        """Find conflicts of the settings with the whole configuration; key, value, reason and fix."""
        return ()

    # With the run -------------------------------------------------------------------------------------------

    def worker(self) -> WorkerExtension | None:
        """Make the part that is sent to the workers; None: there is none, and nothing is reported."""
        return None

    @property
    def sent(self) -> Mapping[str, int] | None:
        """Hash of each row that the loss must see, by its key in ``BatchView.keys``; None: no rows are compared.

        They are compared with the reports' ``hashes``, except for rows that have left, before ``judge``.
        """
        return None

    def silence(self, batch: BatchView, rows: Tensor) -> None:
        """Update ``sent`` for ``rows``, (n,) bool, which stay in the loss with an advantage of 0."""

    @property
    def resumes(self) -> str | None:
        """The key that makes a resumed run need ``state``; None: it is optional."""
        return None

    @property
    def noted(self) -> Mapping[str, Any]:
        """Settings that must be equal for a checkpoint to be resumed."""
        return self.settings
