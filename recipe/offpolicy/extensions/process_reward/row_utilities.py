"""Conversion of a batch's values, as sent by the agent loops, into per-token utilities and their metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...proof.rewards import mean
from ...proof.verify import LivenessError
from .advantages import FIELD, SECTION, utilities
from .prefix_scorer import RowValues


@dataclass(frozen=True)
class BatchUtilities:
    """Utilities of one batch.

    Attributes:
        rows: values of each row.
        values: (n, T) float32, U_i at the last token of episode i, 0 elsewhere.
        positions: (n, T) bool, positions of the utilities.
    """

    rows: Sequence[RowValues]
    values: Tensor
    positions: Tensor

    @property
    def scored(self) -> Tensor:
        """(n,) bool, rows with values."""
        return torch.tensor([bool(row.values) for row in self.rows])

    @property
    def telescope_error(self) -> float:
        """Largest difference between the sum of a row's utilities and V_m - V_0, in nats."""
        apart = [
            abs(float(self.values[row].double().sum()) - (each.values[-1] - each.values[0]))
            for row, each in enumerate(self.rows)
            if each.values
        ]
        return max(apart, default=0.0)


def read_values(found: Sequence[Any]) -> list[RowValues]:
    """Read the values that the agent loops sent with each row.

    Raises:
        LivenessError: a row bypassed the scoring agent loops.
    """
    known = {each.name for each in fields(RowValues)}
    lost = [row for row, each in enumerate(found) if not isinstance(each, Mapping)]
    if lost:
        raise LivenessError(
            f"{SECTION}: {len(lost)} of {len(found)} sequences have no values ({FIELD}); the first is sequence "
            f"{lost[0]}. Some code creates sequences without the scoring agent loops, or drops their extra fields."
        )
    return [RowValues(**{name: value for name, value in each.items() if name in known}) for each in found]


def check_values(
    rows: Sequence[RowValues], versions: Sequence[int | None], *, expected: int | None, max_unscored_share: float
) -> None:
    """Check that rows were scored, and with the weights that sampled their last token.

    Args:
        rows: values of the batch.
        versions: versions of the weights that sampled each row's last token; None if not recorded.
        expected: the version that all rows must have in synchronous training; None: any version.
        max_unscored_share: largest accepted share of rows without values.

    Raises:
        LivenessError: too many rows lack values, or values were computed with other weights.
    """
    unscored = [row for row, each in enumerate(rows) if not each.values]
    if len(unscored) > max_unscored_share * len(rows):
        first = unscored[0]
        raise LivenessError(
            f"{SECTION}: {len(unscored)} of {len(rows)} sequences were not scored. Sequence {first}: "
            f"{rows[first].error or 'no reason is given.'} Fix: remove the cause, or set a larger "
            f"{SECTION}.max_unscored_share (now {max_unscored_share:g})."
        )
    for row, (each, version) in enumerate(zip(rows, versions, strict=True)):
        if not each.values:
            continue
        if version is not None and each.version != version:
            raise LivenessError(
                f"{SECTION}: the last token of sequence {row} was sampled by version {version} of the weights, but its "
                f"values have version {each.version}."
            )
        if expected is not None and each.version is not None and each.version != expected:
            raise LivenessError(
                f"{SECTION}: the values of sequence {row} have version {each.version} of the weights, but this step's "
                f"sequences are sampled by version {expected}: the engine was not synchronised."
            )


def build_utilities(rows: Sequence[RowValues], response_mask: Tensor) -> BatchUtilities:
    """Place each row's utilities at the last tokens of its episodes.

    Raises:
        LivenessError: values do not match the rows' tokens, so rows and values were mixed up.
    """
    values = torch.zeros(response_mask.shape, dtype=torch.float32)
    positions = torch.zeros(response_mask.shape, dtype=torch.bool)
    mask = response_mask.bool()
    for row, each in enumerate(rows):
        if not each.values:
            continue
        last = [end - 1 for end in each.ends]
        if len(each.values) != len(last) + 1 or any(not (0 <= at < mask.shape[1] and mask[row, at]) for at in last):
            raise LivenessError(
                f"{SECTION}: sequence {row} has {len(each.values)} values and episodes that end at {each.ends}, which "
                f"are not tokens of its response: sequences and values are mixed up."
            )
        if last:
            values[row, last] = utilities(each.values)
            positions[row, last] = True
    return BatchUtilities(rows, values, positions)


def find_waste(found: BatchUtilities, within: float, floor: float) -> Tensor:
    """Find the last tokens of wasted episodes, (n, T) bool: those with |U| <= ``within``.

    An episode between two values at the floor does not count, because its utility is unknown rather than 0.
    """
    waste = found.positions & (found.values.abs() <= within)
    for row, each in enumerate(found.rows):
        for end, before, after in zip(each.ends, each.values, each.values[1:], strict=False):
            if before <= floor and after <= floor:
                waste[row, end - 1] = False
    return waste


def move_utility(found: BatchUtilities, row: int) -> Tensor | None:
    """Move a row's largest utility to another of the row's episodes, (n, T); None if there is no other episode."""
    at = found.positions[row].nonzero().flatten().tolist()
    if len(at) < 2 or not found.values[row].any():
        return None
    largest = max(at, key=lambda place: abs(float(found.values[row, place])))
    other = at[0] if largest != at[0] else at[-1]
    moved = found.values.clone()
    moved[row, other] += moved[row, largest]
    moved[row, largest] = 0.0
    return None if torch.equal(moved, found.values) else moved


def compute_separation(values: Tensor, passed: Tensor) -> float:
    """Compute the share of (passed, failed) pairs in which the passed row's value is higher; ties count half.

    Args:
        values: (n,) float.
        passed: (n,) bool.

    Example:
        >>> compute_separation(torch.tensor([-1.0, -2.0, -2.0]), torch.tensor([True, True, False]))
        0.75
    """
    good, bad = values[passed].double(), values[~passed].double().sort().values
    if not len(good) or not len(bad):
        return math.nan
    below = torch.searchsorted(bad, good, side="left") + torch.searchsorted(bad, good, side="right")
    return float(below.double().mean() / (2 * len(bad)))


def compute_covered(spans: Sequence[tuple[float, float]]) -> float:
    """Compute the length of the union of (begin, end) spans.

    Example:
        >>> compute_covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
        4.0
    """
    covered, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return covered


def summarize_values(found: BatchUtilities, scores: Tensor) -> dict[str, float]:
    """Compute the metrics of a batch's values; ``scores`` (n,) are the rows' rewards, and a row above 0 has passed."""
    scored, passed = found.scored, scores > 0
    firsts = torch.tensor([each.values[0] if each.values else math.nan for each in found.rows])
    lasts = torch.tensor([each.values[-1] if each.values else math.nan for each in found.rows])
    counts = torch.tensor([float(len(each.ends)) for each in found.rows])[scored]
    dealt = found.values[found.positions]
    metrics = {
        "episodes/mean": mean(counts),
        "episodes/max": float(counts.max()) if len(counts) else math.nan,
        "value/separation": compute_separation(lasts[scored], passed[scored]),
        "utility/mean": mean(dealt),
        "utility/std": float(dealt.double().std()) if len(dealt) > 1 else math.nan,
        "utility/positive_share": mean((dealt > 0).float()),
        "telescope_error": found.telescope_error,
        "unscored_rows": float((~scored).sum()),
    }
    for name, values in (("first", firsts), ("last", lasts)):
        metrics[f"value/{name}/mean"] = mean(values[scored])
        metrics[f"value/{name}/passed"] = mean(values[scored & passed])
        metrics[f"value/{name}/failed"] = mean(values[scored & ~passed])
    return metrics


def summarize_waste(found: BatchUtilities, waste: Tensor) -> dict[str, float]:
    """Compute the share of wasted episodes, and of the tokens in them, among scored rows."""
    lengths = [
        (end - begin, bool(waste[row, end - 1]))
        for row, each in enumerate(found.rows)
        if each.values
        for begin, end in itertools.pairwise([0, *each.ends])
    ]
    tokens = sum(length for length, _ in lengths)
    wasted = sum(length for length, is_waste in lengths if is_waste)
    return {
        "waste/share": sum(is_waste for _, is_waste in lengths) / len(lengths) if lengths else math.nan,
        "waste/token_share": wasted / tokens if tokens else math.nan,
    }


def summarize_cost(rows: Sequence[RowValues], began: float | None) -> dict[str, float]:
    """Compute the metrics of the cost of scoring.

    Args:
        rows: rows of the batch.
        began: time at which the batch's prompts were submitted, in seconds of ``time.time``; None: unknown.
    """
    spans = [(each.began, each.ended) for each in rows if each.ended]
    seconds = compute_covered(spans)
    forward, cached = (sum(getattr(each, name) for each in rows) for name in ("forward", "cached"))
    whole = max((end for _, end in spans), default=math.nan) - began if began is not None else math.nan
    return {
        "cost/requests": float(sum(each.requests for each in rows)),
        "cost/forward_tokens": float(forward),
        "cost/cached_share": cached / (forward + cached) if forward + cached else math.nan,
        "cost/rescored": float(sum(each.rescored for each in rows)),
        "cost/seconds": seconds,
        "cost/share_of_rollout": seconds / whole if whole > 0 else math.nan,
    }


def summarize_advantages(outcome: Tensor, process: Tensor, mask: Tensor) -> Mapping[str, float]:
    """Compute the spread of both parts of the advantages over response tokens, and the process part's share."""
    there = mask.bool()
    own, other = process[there].double(), outcome[there].double()
    total = float(own.abs().sum() + other.abs().sum())
    return {
        "advantage/outcome_std": float(other.std()) if len(other) > 1 else math.nan,
        "advantage/process_std": float(own.std()) if len(own) > 1 else math.nan,
        "advantage/share": float(own.abs().sum()) / total if total else math.nan,
    }
