"""Handover of the correction to verl's legacy actors, with each batch, in ``meta_info``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ..batch.plan import SharedPlan
from ..correction import CorrectionSpec
from ..correction.moving_bounds import Side
from ..extensions.extension import WorkerExtension
from ..recording.settings import RecordSettings

if TYPE_CHECKING:
    from .legacy_loss import LegacyUpdate


@dataclass(frozen=True)
class Handover:
    """The correction, by value, and what is fixed for the batch that it travels with.

    It is what ``verl_patches.legacy.handover`` calls a Handover.

    Attributes:
        spec: the correction.
        prove: report the proof of life at every micro-batch.
        shadows: corrections to report on without applying them, by name.
        plan: what the trainer fixed for the whole batch.
        record: what to record.
        moving: parts whose bounds come with the plan, and the sides that move.
    """

    spec: CorrectionSpec
    plan: SharedPlan
    prove: bool = False
    shadows: Mapping[str, CorrectionSpec] = field(default_factory=dict)
    record: RecordSettings | None = None
    moving: Mapping[str, Side] = field(default_factory=dict)

    # No field, so that a handover without extensions travels as it always did.
    extensions: ClassVar[Mapping[str, WorkerExtension]] = MappingProxyType({})

    @property
    def reads_rollout_log_probs(self) -> bool:
        return self.ours

    @property
    def ours(self) -> bool:
        """True if the actor trains with our loss, and not with verl's own."""
        return not self.spec.is_none or bool(self.extensions)

    def update(self, actor_config: Any, *, dp_size: int, upstream: Callable[[], float]) -> LegacyUpdate:
        # Imported where it is used, in the worker: it imports verl's losses.
        from .legacy_loss import LegacyUpdate

        return LegacyUpdate(self, actor_config, dp_size=dp_size, upstream=upstream)


@dataclass(frozen=True)
class ExtendedHandover(Handover):
    """A handover with the workers' halves of extensions, by section."""

    extensions: Mapping[str, WorkerExtension] = field(default_factory=dict)  # type: ignore[misc]


def build_handover(*arguments: Any, extensions: Mapping[str, WorkerExtension]) -> Handover:
    """Make a handover of these fields, extended where there is something to extend it with."""
    if not extensions:
        return Handover(*arguments)
    return ExtendedHandover(*arguments, extensions=extensions)  # type: ignore[misc]
