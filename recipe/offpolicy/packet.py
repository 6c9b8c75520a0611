"""What the worker's loss reports to the trainer, past verl's own reduction of metrics.

verl gathers the metrics of all micro-batches and ranks into lists before the trainer reduces them by name. A packet
rides along as one opaque object a micro-batch and is taken out before that reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .alignment import Tally
from .correction import Statistic
from .proof import Proof

METRIC_KEY = "offpolicy"
"""Key of the packet among the worker's metrics; the trainer takes it out before verl reduces them."""


@dataclass
class Packet:
    """What one micro-batch reports: plain Python, no tensors.

    Attributes:
        fingerprint: of the spec that the worker holds.
        statistics: name -> typed statistic, in floats.
        rows: checksums of mu and the tokens it was used with, see ``micro_batch.row_checksums``.
        bounds: mask -> the bounds that were used, of masks whose bounds move.
        histograms: of these masks, see ``calibration.online_histogram``.
        alignment: agreement of mu and pi, where there is no pi_old to hold mu against.
        proof: filled in by the engine's own backward when a proof was asked for.
    """

    fingerprint: int
    statistics: dict[str, Statistic] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    bounds: dict[str, dict[str, float | None]] = field(default_factory=dict)
    histograms: dict[str, Statistic] = field(default_factory=dict)
    alignment: Tally | None = None
    proof: Proof | None = None


def take_packets(metrics: dict[str, Any]) -> list[Packet]:
    """Remove and return the packets of one update, from every rank, mini-batch and micro-batch."""
    return list(_flatten(metrics.pop(METRIC_KEY, [])))


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    else:
        yield value
