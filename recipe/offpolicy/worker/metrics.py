"""Statistics of mu, pi_old and pi, measured on the device, and the metrics that the worker's loss returns.

On a small micro-batch, the cost of measuring depends on the number of operations, not on the number of tokens, so
measuring many micro-batches together takes hardly longer than measuring one. All measured values add up over rows,
except the agreement of mu and pi, which compares rows with each other and is more reliable with more rows.

verl gathers the metrics of all micro-batches and ranks into lists before the trainer reduces them by name. Each
micro-batch adds one packet, an opaque object, to these lists, and the trainer removes the packets before the reduction.

Until a packet leaves the worker, it keeps the rows that it reports on, as tensors on their device. All packets of one
loss share a ``Ledger``. verl gathers metrics after every mini-batch, and ``verl_patches.worker_seams`` first calls each
packet's ``before_sending``. A packet sent before the update's last mini-batch stays in the ledger, and its copy is sent
without numbers. The first packet of the last mini-batch contains the numbers of the whole update, because all rows are
measured together and their numbers are copied to the host in one transfer. If packets do not leave the process,
``take_packets`` measures their rows. A packet that is never read, for example on a rank from which verl collects no
metrics, is freed together with its rows, which are never measured. Pickling does not change a packet, and raises an
error if ``before_sending`` was not called first. The pickled form is flat, so the driver's cost of reading a packet
hardly depends on the number of rows and statistics. The driver reads one packet per micro-batch and rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from verl.utils.metric import Metric

from ..batch import micro_batch as mb
from ..batch.plan import Shares, add_shares, take_reports
from ..batch.seals import drop_empty_rows, hash_rows
from ..batch.weight_versions import UNKNOWN, compute_token_versions
from ..correction import CorrectionSpec, Statistic
from ..correction.correction_parts import OF_THE_TRAINER
from ..correction.spec import Side
from ..correction.statistics import DeferredValue, defer_statistics, fetch, flatten, merge_all
from ..monitor.mismatch_shares import defer_share_statistics
from ..monitor.moving_bounds import defer_histograms
from ..proof.gradient import Proof
from ..proof.token_alignment import AlignmentTally, count_agreements

Name = Literal["statistics", "attribution", "histograms", "alignment", "rows", "scales", "shares"]

_COLUMNS = ("responses", "response_mask", "rollout_log_prob", "old_log_prob", "log_prob", "advantages")


@dataclass(frozen=True)
class Observation:
    """Rows to measure together, and their settings.

    Attributes:
        batch: the rows, detached.
        spec: the correction that was applied to the rows, with its bounds at that time.
        shadows: corrections, by name, that are reported without being applied.
        moving: parts whose bounds are sent with each update, and the sides that move.
        trained: True if the rows produced a gradient with this correction. Liveness and bounds are then checked on
            these rows.
    """

    batch: mb.MicroBatch
    spec: CorrectionSpec
    shadows: Mapping[str, CorrectionSpec]
    moving: Mapping[str, Side]
    trained: bool

    def fits(self, other: Observation) -> bool:
        """Return True if this observation and ``other`` can be measured together."""
        mine, its = self.batch, other.batch
        return (
            (self.spec, self.shadows, self.moving, self.trained)
            == (other.spec, other.shadows, other.moving, other.trained)
            and mine.plan == its.plan
            and type(mine.versions) is type(its.versions)
            and all(getattr(mine, name).dtype == getattr(its, name).dtype for name in _COLUMNS)
        )


def merge(observations: Sequence[Observation]) -> Observation:
    """Merge compatible observations into one, padded to the longest row."""
    first = observations[0]
    if len(observations) == 1:
        return first
    batches = [observation.batch for observation in observations]
    width = max(batch.width for batch in batches)
    columns: dict[str, Any] = {
        name: torch.cat([_widened(getattr(batch, name), width) for batch in batches]) for name in _COLUMNS
    }
    if (versions := first.batch.versions) is not None:
        named = {each.name: [getattr(batch.versions, each.name) for batch in batches] for each in fields(versions)}
        merged = {name: torch.cat([_widened(one, width, UNKNOWN) for one in parts]) for name, parts in named.items()}
        columns["versions"] = replace(versions, **merged)
    if any(batch.withheld is not None for batch in batches):
        masks = [torch.zeros_like(each.response_mask) if each.withheld is None else each.withheld for each in batches]
        columns["withheld"] = torch.cat([_widened(mask, width) for mask in masks])
    # All other fields are equal in all observations, or are not used by measurements.
    return replace(first, batch=replace(first.batch, **columns))


def split(observation: Observation, most: int) -> Iterator[Observation]:
    """Split an observation into blocks of whole rows with at most ``most`` padded tokens, unless one row is longer.

    This limits the memory needed for measuring, which is about 400 bytes per token.
    """
    batch = observation.batch
    rows = max(most // max(batch.width, 1), 1)
    if len(batch.response_mask) <= rows:
        yield observation
        return
    for start in range(0, len(batch.response_mask), rows):
        at = slice(start, start + rows)
        columns: dict[str, Any] = {name: getattr(batch, name)[at] for name in _COLUMNS}
        if (versions := batch.versions) is not None:
            columns["versions"] = replace(
                versions, **{one.name: getattr(versions, one.name)[at] for one in fields(versions)}
            )
        if batch.withheld is not None:
            columns["withheld"] = batch.withheld[at]
        yield replace(observation, batch=replace(batch, **columns))


@torch.no_grad()
def measure(observation: Observation) -> dict[Name, DeferredValue[Any]]:
    """Measure the rows; return the values, keyed by the packet's attributes."""
    batch, spec = observation.batch, observation.spec
    old_log_prob = mb.choose_pi_old(spec, batch)
    policies = {
        "rollout_log_prob": batch.rollout_log_prob,
        "old_log_prob": old_log_prob,
        "log_prob": batch.log_prob,
        "response_mask": batch.policy_mask,
    }
    staleness = mb.compute_staleness(batch)
    statistics, of_shadows = mb.decide_with_shadows(spec, observation.shadows, batch)
    readings: dict[Name, DeferredValue[Any]] = {
        "statistics": defer_statistics(statistics | of_shadows),
        "attribution": defer_share_statistics(
            **policies, staleness=staleness if spec.proximal in OF_THE_TRAINER else None
        ),
    }
    if not observation.trained:
        return readings
    readings["rows"] = DeferredValue(
        hash_rows(batch.responses, batch.response_mask, batch.rollout_log_prob), drop_empty_rows
    )
    if spec.proximal != "recompute":
        readings["alignment"] = count_agreements(batch.log_prob, batch.rollout_log_prob, batch.policy_mask)
    if observation.moving:
        readings["histograms"] = defer_histograms(
            spec,
            observation.moving,
            **policies,
            advantages=batch.advantages,
            segment_ids=batch.turns,
            versions=compute_token_versions(batch.versions, batch.response_mask) if "version" in spec.levels else None,
            staleness=staleness,
        )
    return readings


def _widened(column: Tensor, width: int, value: int = 0) -> Tensor:
    missing = width - column.shape[-1] if column.dim() == 2 else 0
    return torch.nn.functional.pad(column, (0, missing), value=value) if missing else column


METRIC_KEY = "offpolicy"
"""Key of the packet among the worker's metrics; the trainer removes it before verl reduces them."""
AT_ONCE = 1 << 18
"""Maximum number of padded tokens that are queued and measured together. Beyond this number, the rows are measured
early, block by block, and their numbers are queued."""


@dataclass
class Packet:
    """Metrics packet of one micro-batch; once settled (its values are fetched), it contains only plain Python values.

    Attributes:
        fingerprint: fingerprint of the worker's spec.
        statistics: name -> typed statistic, in floats.
        rows: checksums of mu and its tokens, see ``seals.compute_row_checksums``.
        plan: fingerprint of the plan that arrived; 0 for none.
        bounds: part -> the bounds that were used, for parts whose bounds move.
        histograms: histograms of the parts whose bounds move, see ``monitor.moving_bounds``.
        alignment: agreement of mu and pi; set only if no pi_old was computed that could be compared with mu.
        proof: completed by the engine's own backward pass if a proof was requested.
        reports: reports of extensions, by section.
        scales: ratio of the engine's factor of the loss to the expected factor -> number of micro-batches. 1: as
            expected; 0: the loss was not differentiated.
        shares: contributions to verl's denominators, see ``batch.plan.Shares``.

    Statistics, rows, histograms, alignment, scales and shares cover all packets that were queued with this packet.
    """

    fingerprint: int
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    plan: int = 0
    bounds: dict[str, dict[str, float | None]] = field(default_factory=dict)
    histograms: Mapping[str, Statistic] = field(default_factory=dict)
    alignment: AlignmentTally | None = None
    proof: Proof | None = None
    reports: dict[str, Any] = field(default_factory=dict)
    scales: dict[float, int] = field(default_factory=dict)
    shares: Shares = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._arrived: Tensor | None = None
        self._ledger: Ledger | None = None
        self._observed: Observation | None = None
        self._readings: list[dict[Name, DeferredValue[Any]]] = []

    def watch(self, loss: Tensor, expected: Tensor | float | None) -> None:
        """Record the gradient that arrives at ``loss`` in the engine's backward pass, as a multiple of ``expected``."""
        if expected is None or self._ledger is None or not loss.requires_grad:
            return
        self._arrived = loss.new_zeros((), requires_grad=False)

        def arrive(gradient: Tensor) -> None:
            # Megatron's loss scale is not a scalar tensor.
            self._arrived = (gradient.detach() / expected).reshape(())

        loss.register_hook(arrive)

    def note(self, name: Name, value: DeferredValue[Any]) -> None:
        """Add a value on the device to the attribute ``name``."""
        self._readings.append({name: value})

    def settle(self) -> None:
        """Copy the values of this packet, and of all packets queued with it, to the host."""
        if self._ledger is not None:
            self._ledger.settle(self)

    def before_sending(self) -> None:
        """Settle the packet, or wait for the update's last mini-batch; called before a copy is sent to another
        process."""
        if self._ledger is not None:
            self._ledger.leave(self)

    def __getstate__(self) -> dict[str, Any]:
        if self._ledger is not None and not self._ledger.keeps(self):
            raise RuntimeError(
                "a packet of metrics was pickled while its numbers were on the device. Fix: call before_sending() "
                "first."
            )
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        state["rows"] = array("q", self.rows).tobytes()
        for name in ("statistics", "histograms"):
            state[name] = flatten(state[name])
        # Most packets were queued together with another packet and have no values of their own.
        return {name: value for name, value in state.items() if value or name == "fingerprint"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = array("q", state.get("rows", b"")).tolist()
        self.__init__(**state | {"rows": rows})  # type: ignore[misc]

    def _take(self, found: Mapping[Name, Sequence[Any]]) -> None:
        """Add measured values; each attribute is merged in one step, regardless of the number of measurements."""
        of_tokens = [*found.get("statistics", ()), *found.get("attribution", ())]
        self.statistics = merge_all([self.statistics, *of_tokens])
        self.histograms = merge_all([self.histograms, *found.get("histograms", ())])
        self.rows = [*self.rows, *chain.from_iterable(found.get("rows", ()))]
        if tallies := found.get("alignment", ()):
            self.alignment = sum(tallies, self.alignment or AlignmentTally())
        for scale in chain.from_iterable(found.get("scales", ())):
            self.scales[scale] = self.scales.get(scale, 0) + 1
        if shares := found.get("shares", ()):
            self.shares = add_shares([self.shares, *shares])


class Ledger:
    """Packets of one loss that have not been settled. A ledger never leaves its process.

    A ledger keeps alive only packets that were sent before the last mini-batch of their update.
    """

    def __init__(self) -> None:
        # The references are weak, because the rows of packets that verl has dropped must not stay in memory. The keys
        # are ids, because packets with the same content are equal. The references stay in insertion order.
        self._packets: WeakValueDictionary[int, Packet] = WeakValueDictionary()
        self._waiting: WeakValueDictionary[int, Packet] = WeakValueDictionary()
        self._waiting_rows = self._waiting_width = 0
        self._kept: dict[int, Packet] = {}
        self._more = False

    # A loss that is pickled to another process starts with a new ledger there.
    def __reduce__(self) -> tuple[type[Ledger], tuple[()]]:
        return Ledger, ()

    def enter(self, packet: Packet, observation: Observation, *, more: bool = False) -> None:
        """Queue ``observation``, on which ``packet`` will report.

        Args:
            more: the update has another mini-batch after this one.
        """
        first = next(self._waiting.values(), None)
        rows, width = observation.batch.response_mask.shape
        padded = (self._waiting_rows + rows) * max(self._waiting_width, width)
        known = None if first is None else first._observed
        if padded > AT_ONCE or known is None or not known.fits(observation):
            self._measure()
        self._more = more
        packet._ledger, packet._observed = self, observation
        self._packets[id(packet)] = self._waiting[id(packet)] = packet
        self._waiting_rows, self._waiting_width = self._waiting_rows + rows, max(self._waiting_width, width)
        if rows * width >= AT_ONCE:
            self._measure()

    def leave(self, packet: Packet) -> None:
        """Settle ``packet`` before a copy of it is sent, or keep it until the last mini-batch."""
        if self._more:
            self._kept[id(packet)] = packet
        else:
            self.settle(packet)

    def keeps(self, packet: Packet) -> bool:
        """Return True if a copy of ``packet`` was sent and ``packet`` itself is kept for the last mini-batch."""
        return id(packet) in self._kept

    def settle(self, packet: Packet) -> None:
        """Measure the queued rows, fetch all values, and store them in ``packet``."""
        self._measure()
        alive = list(self._packets.values())
        readings = [pair for other in alive for found in other._readings for pair in found.items()]
        if arrived := [other._arrived for other in alive if other._arrived is not None]:
            readings.append(("scales", DeferredValue(torch.stack(arrived).double(), list)))
        taken: dict[Name, list[Any]] = {}
        for (name, _), found in zip(readings, fetch([reading for _, reading in readings]), strict=True):
            taken.setdefault(name, []).append(found)
        packet._take(taken)
        for other in alive:
            other._ledger, other._readings, other._arrived = None, [], None
        self._packets, self._kept = WeakValueDictionary(), {}

    def _measure(self) -> None:
        """Measure the queued rows on the device, and store the values in the last of the rows' packets."""
        waiting = list(self._waiting.values())
        self._waiting, self._waiting_rows, self._waiting_width = WeakValueDictionary(), 0, 0
        observed = [packet._observed for packet in waiting if packet._observed is not None]
        if not observed:
            return
        waiting[-1]._readings += map(measure, split(merge(observed), AT_ONCE))
        for packet in waiting:
            packet._observed = None


def merge_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the metrics of a micro-batch's parts as verl merges micro-batches' metrics; packets stay separate."""
    merged: dict[str, Any] = {}
    for key, first in parts[0].items():
        values = [part[key] for part in parts]
        if key == METRIC_KEY:
            merged[key] = values
        elif isinstance(first, Metric):
            whole = first.init_list()
            whole.extend([value for each in values for value in each.values])
            # verl requires one value per micro-batch from each rank.
            merged[key] = Metric(first.aggregation, whole.aggregate())
        else:
            merged[key] = first
    return merged


def take_packets(metrics: dict[str, Any]) -> list[Packet]:
    """Remove, settle and return the packets of one update from every rank, mini-batch and micro-batch."""
    packets: list[Packet] = take_reports(metrics, METRIC_KEY)
    for packet in packets:
        packet.settle()
    return packets
