"""The correction with which a legacy actor trains, and the batch-level constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from ..batch.plan import SharedPlan
from ..correction import CorrectionSpec
from ..correction.bounds import Side
from ..extensions.add_on import WorkerExtension
from ..recording.record_settings import RecordSettings


@dataclass(frozen=True)
class LegacySettings:
    """The correction, passed by value, and the constants of the batch with which it is sent.

    Attributes:
        spec: the correction.
        prove: True to prove every micro-batch, not only those that the plan marks.
        shadows: corrections, by name, that are reported without being applied.
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

    # This is not a field, so that the pickled form of a handover without extensions does not change.
    extensions: ClassVar[Mapping[str, WorkerExtension]] = MappingProxyType({})

    @property
    def ours(self) -> bool:
        """True if the actor trains with this package's loss instead of verl's."""
        return not self.spec.is_none or bool(self.extensions)
