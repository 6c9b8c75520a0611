"""What a worker without ``set_loss_fn`` is handed with each batch: verl's legacy actors read it from ``meta_info``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .batch_plan import SharedPlan
from .calibration.online_histogram import Side
from .correction import CorrectionSpec
from .recording.settings import RecordSettings

HANDOVER = "offpolicy_handover"
"""Key of the ``Handover`` in a DataProto's ``meta_info``."""


@dataclass(frozen=True)
class Handover:
    """The correction, by value, and what is fixed for the batch that it travels with.

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
