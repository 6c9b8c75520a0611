"""Statistics of mu, pi_old and pi, measured on the device for several micro-batches at a time.

On a small micro-batch the cost of measuring is the number of operations, not of tokens: measuring the rows of many
micro-batches together takes little longer than measuring one. Everything here adds up over rows, except the agreement
of mu and pi, which compares rows with each other and gains from more rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..batch import micro_batch as mb
from ..batch.checksums import hash_rows
from ..batch.token_versions import UNKNOWN, TokenVersions
from ..batch.weight_versions import RowVersions, compute_token_versions
from ..correction import CorrectionSpec
from ..correction.deferred_value import DeferredValue, defer_statistics
from ..correction.moving_bounds import Side
from ..correction.proximal import OF_THE_TRAINER
from ..monitor.bounds.bound_measurement import defer_histograms
from ..monitor.mismatch.share_statistics import defer_share_statistics
from ..proof.token_alignment import count_agreements

Name = Literal["statistics", "attribution", "histograms", "alignment", "rows", "scales"]

_COLUMNS = ("responses", "response_mask", "rollout_log_prob", "old_log_prob", "log_prob", "advantages")


@dataclass(frozen=True)
class Observation:
    """Rows to measure together, and their settings.

    Attributes:
        batch: the rows, detached.
        spec: the correction that acted on them, with the bounds that it had.
        shadows: corrections that are reported without being applied, by name.
        moving: parts whose bounds are sent with each update, and the sides that move.
        trained: the rows produced a gradient with this correction, so its liveness and its bounds are judged on them.
    """

    batch: mb.MicroBatch
    spec: CorrectionSpec
    shadows: Mapping[str, CorrectionSpec]
    moving: Mapping[str, Side]
    trained: bool

    def fits(self, other: Observation) -> bool:
        """Return True if both can be measured as one."""
        mine, its = self.batch, other.batch
        return (
            (self.spec, self.shadows, self.moving, self.trained)
            == (other.spec, other.shadows, other.moving, other.trained)
            and mine.plan == its.plan
            and type(mine.versions) is type(its.versions)
            and all(getattr(mine, name).dtype == getattr(its, name).dtype for name in _COLUMNS)
        )


def merge(observations: Sequence[Observation]) -> Observation:
    """Merge compatible observations into one, padded to the longest."""
    first = observations[0]
    if len(observations) == 1:
        return first
    batches = [observation.batch for observation in observations]
    width = max(batch.width for batch in batches)
    columns: dict[str, Any] = {
        name: torch.cat([_widened(getattr(batch, name), width) for batch in batches]) for name in _COLUMNS
    }
    known = [batch.versions for batch in batches if batch.versions is not None]
    if known:
        columns["versions"] = _merge_versions(known, width)
    if any(batch.withheld is not None for batch in batches):
        masks = [torch.zeros_like(each.response_mask) if each.withheld is None else each.withheld for each in batches]
        columns["withheld"] = torch.cat([_widened(mask, width) for mask in masks])
    # Other fields are the same for all, or unused by measurements.
    return replace(first, batch=replace(first.batch, **columns))


def split(observation: Observation, most: int) -> Iterator[Observation]:
    """Split an observation into blocks of whole rows of at most ``most`` padded tokens each, unless a row is longer.

    This bounds the extra memory of measuring, about 400 bytes per token.
    """
    batch = observation.batch
    rows = max(most // max(batch.width, 1), 1)
    if len(batch.response_mask) <= rows:
        yield observation
        return
    for start in range(0, len(batch.response_mask), rows):
        at = slice(start, start + rows)
        columns: dict[str, Any] = {name: getattr(batch, name)[at] for name in _COLUMNS}
        if batch.versions is not None:
            each = {one.name: getattr(batch.versions, one.name)[at] for one in fields(batch.versions)}
            columns["versions"] = type(batch.versions)(**each)
        if batch.withheld is not None:
            columns["withheld"] = batch.withheld[at]
        yield replace(observation, batch=replace(batch, **columns))


@torch.no_grad()
def measure(observation: Observation) -> dict[Name, DeferredValue[Any]]:
    """Measure the rows; returns values by the packet's attribute."""
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
        hash_rows(batch.responses, batch.response_mask, batch.rollout_log_prob), mb.drop_empty_rows
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


def _merge_versions(parts: Sequence[RowVersions], width: int) -> RowVersions:
    oldest, newest = (torch.cat([getattr(part, name) for part in parts]) for name in ("oldest", "newest"))
    tokens = [_widened(part.tokens, width, UNKNOWN) for part in parts if isinstance(part, TokenVersions)]
    return TokenVersions(oldest, newest, torch.cat(tokens)) if tokens else RowVersions(oldest, newest)


def _widened(column: Tensor, width: int, value: int = 0) -> Tensor:
    missing = width - column.shape[1]
    return torch.nn.functional.pad(column, (0, missing), value=value) if missing else column
