"""Sends the correction to verl's legacy actors, with each batch, in ``meta_info``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ..batch.plan import SharedPlan
from ..correction import CorrectionSpec
from ..correction.moving_bounds import Side
from ..extensions.extension import WorkerExtension
from ..recording.record_settings import RecordSettings

if TYPE_CHECKING:
    from .legacy_loss import LegacyUpdate


@dataclass(frozen=True)
class Handover:
    """The correction, by value, and the constants of its batch: the ``LegacyHandover`` of ``verl_patches.legacy``.

    Attributes:
        spec: the correction.
        prove: prove every micro-batch, not only the ones that the plan marks.
        shadows: corrections that are reported without being applied, by name.
        plan: the trainer's constants for the whole batch.
        record: what to record.
        moving: parts whose bounds are sent with the plan, and the sides that move.
    """

    spec: CorrectionSpec
    plan: SharedPlan
    prove: bool = False
    shadows: Mapping[str, CorrectionSpec] = field(default_factory=dict)
    record: RecordSettings | None = None
    moving: Mapping[str, Side] = field(default_factory=dict)

    # Not a field, so that a handover without extensions is pickled as before.
    extensions: ClassVar[Mapping[str, WorkerExtension]] = MappingProxyType({})

    @property
    def ours(self) -> bool:
        """True if the actor trains with this package's loss instead of verl's."""
        return not self.spec.is_none or bool(self.extensions)

    @property
    def reads_rollout_log_probs(self) -> bool:
        return self.ours

    def update(self, actor_config: Any, *, dp_size: int, upstream: Callable[[], float]) -> LegacyUpdate:
        # Imported on use, in the worker, because it imports verl's losses.
        from .legacy_loss import LegacyUpdate

        return LegacyUpdate(self, actor_config, dp_size=dp_size, upstream=upstream)


@dataclass(frozen=True)
class ExtendedHandover(Handover):
    """A handover with the worker parts of extensions, by section."""

    extensions: Mapping[str, WorkerExtension] = field(default_factory=dict)  # type: ignore[misc]


def build_handover(*arguments: Any, extensions: Mapping[str, WorkerExtension], **fields: Any) -> Handover:
    """Build a handover of these fields, extended if there are extensions."""
    if not extensions:
        return Handover(*arguments, **fields)
    return ExtendedHandover(*arguments, extensions=extensions, **fields)  # type: ignore[misc]
