"""Metrics of process rewards, ``process_reward/*``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .prefix_scorer import RowValues
from .row_utilities import BatchUtilities


def compute_separation(values: Tensor, passed: Tensor) -> float:
    """Compute the share of pairs (one that passed, one that failed) in which the former's value is higher; ties half.

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
    """Compute the metrics of a batch's values; ``scores`` (n,) are the rows' rewards, rows above 0 passed."""
    scored, passed = found.scored, scores > 0
    firsts = torch.tensor([each.values[0] if each.values else math.nan for each in found.rows])
    lasts = torch.tensor([each.values[-1] if each.values else math.nan for each in found.rows])
    counts = torch.tensor([float(len(each.ends)) for each in found.rows])[scored]
    dealt = found.values[found.positions]
    metrics = {
        "episodes/mean": _mean(counts),
        "episodes/max": float(counts.max()) if len(counts) else math.nan,
        "value/separation": compute_separation(lasts[scored], passed[scored]),
        "utility/mean": _mean(dealt),
        "utility/std": float(dealt.double().std()) if len(dealt) > 1 else math.nan,
        "utility/positive_share": _mean((dealt > 0).float()),
        "telescope_error": found.telescope_error,
        "unscored_rows": float((~scored).sum()),
    }
    for name, values in (("first", firsts), ("last", lasts)):
        metrics[f"value/{name}/mean"] = _mean(values[scored])
        metrics[f"value/{name}/passed"] = _mean(values[scored & passed])
        metrics[f"value/{name}/failed"] = _mean(values[scored & ~passed])
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
        began: time when its prompts were submitted, in seconds of ``time.time``; None: unknown.
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


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan
