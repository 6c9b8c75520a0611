"""The correction that a legacy actor trains with, and what is fixed for the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from ..batch.plan import SharedPlan
from ..correction import CorrectionSpec
from ..correction.moving_bounds import Side
from ..extensions.extension import WorkerExtension
from ..recording.record_settings import RecordSettings


@dataclass(frozen=True)
class LegacySettings:
    """The correction, by value, and what is fixed for the batch that it travels with.

    Attributes:
        spec: the correction.
        prove: prove every micro-batch, and not those alone that the plan marks.
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
    def ours(self) -> bool:
        """True if the actor trains with our loss, and not with verl's own."""
        return not self.spec.is_none or bool(self.extensions)
