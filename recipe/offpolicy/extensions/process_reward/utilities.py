"""Utilities of episodes, their per-token advantages, and the metrics of a batch's values.

The value of a prefix is V = mean log p(answer | prefix + force prompt), and the utility of episode i is
U_i = V_i - V_{i-1}: the increase of the policy's belief in the answer. Utilities telescope to V_m - V_0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...proof.rewards import mean, measure_spread
from ...proof.verify import LivenessError
from .prefix_scorer import FIELD, RowValues
from .settings import SECTION, Normalize

UTILITY = "offpolicy_process_utility"
"""float32 per token: the utility of the episode that ends here; NaN elsewhere."""
LOG_PROBS = 1.0
"""Typical size of log-probs in nats. Utilities are differences of log-probs, so their rounding errors are on this
scale."""


def token_advantages(
    utilities: Tensor,
    positions: Tensor,
    groups: Sequence[Hashable],
    response_mask: Tensor,
    *,
    normalize: Normalize,
    penalty: Tensor | float = 0.0,
) -> Tensor:
    """Compute each token's process advantage, (B, T): the sum of normalised utilities from the token to the row's end.

    Args:
        utilities: (B, T) float, read only at ``positions``.
        positions: (B, T) bool, last tokens of episodes; a utility of 0 counts.
        groups: (B,) prompt of each row.
        response_mask: (B, T) bool or 0/1; advantages are 0 outside it.
        normalize: see ``normalize_utilities``.
        penalty: (B, T), subtracted from normalised utilities.

    Raises:
        ValueError: as ``normalize_utilities``.

    Example:
        The first of two responses to a prompt has two episodes, the second has one. The three utilities have mean
        0.1667, standard deviation 0.2517 and root mean square 0.2646. ``zscore`` makes the first row's advantages
        negative although its utilities sum to 0.1.

        >>> u = torch.tensor([[0.0, 0.2, 0.0, -0.1], [0.0, 0.4, 0.0, 0.0]])
        >>> at, mask = u != 0, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        >>> token_advantages(u, at, ["a", "a"], mask, normalize="zscore")[0]
        tensor([-0.9272, -0.9272, -1.0596, -1.0596])
        >>> token_advantages(u, at, ["a", "a"], mask, normalize="scale")[0]
        tensor([ 0.3780,  0.3780, -0.3780, -0.3780])
    """
    dealt = normalize_utilities(utilities, positions, groups, normalize=normalize) - penalty
    returns = dealt.flip(-1).cumsum(-1).flip(-1)
    return torch.where(response_mask.bool(), returns, 0.0).to(utilities.dtype)


def normalize_utilities(
    utilities: Tensor, positions: Tensor, groups: Sequence[Hashable], *, normalize: Normalize
) -> Tensor:
    """Normalise utilities by statistics over the n positions of their group, (B, T) float64, 0 elsewhere.

    ``zscore`` subtracts the group's mean and divides by its unbiased standard deviation; the result is at most sqrt(n -
    1) in absolute value, and 0 if all utilities agree within float32 rounding. ``scale`` divides by the root mean
    square; the result is at most sqrt(n) in absolute value, and 0 if all utilities are rounding errors. ``none`` leaves
    utilities unchanged.

    Raises:
        ValueError: a utility at a position is not finite.
    """
    there = positions.bool()
    if (lost := there & ~torch.isfinite(utilities)).any():
        row, place = (int(index) for index in lost.nonzero()[0])
        raise ValueError(f"the utility at token {place} of row {row} is not finite.")
    dealt = torch.where(there, utilities.double(), 0.0)  # sums of large values overflow in float32
    if normalize == "none":
        return dealt
    rows_of: dict[Hashable, list[int]] = {}
    for row, name in enumerate(groups):
        rows_of.setdefault(name, []).append(row)
    for rows in rows_of.values():
        found = dealt[rows][there[rows]]
        centred = normalize == "zscore"
        factor = measure_spread(found, centred=centred, size=LOG_PROBS).invert()
        centre = found.mean() if centred and len(found) else 0.0
        dealt[rows] = torch.where(there[rows], (dealt[rows] - centre) * factor, 0.0)
    return dealt


@dataclass(frozen=True)
class BatchUtilities:
    """The utilities of one batch.

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
        LivenessError: a row was not created by the agent loops that score rows.
    """
    known = {each.name for each in fields(RowValues)}
    lost = [row for row, each in enumerate(found) if not isinstance(each, Mapping)]
    if lost:
        first = f"{len(lost)} of {len(found)} sequences have no values ({FIELD}); the first is sequence {lost[0]}"
        reason = "Some code creates sequences without the agent loops that score them, or drops their extra fields."
        raise LivenessError(f"{SECTION}: {first}. {reason}")
    return [RowValues(**{name: value for name, value in each.items() if name in known}) for each in found]


def check_values(
    rows: Sequence[RowValues], versions: Sequence[int | None], *, expected: int | None, max_unscored_share: float
) -> None:
    """Check that rows were scored with the weights that sampled their last token.

    Args:
        rows: values of the batch.
        versions: version of the weights that sampled each row's last token; None if it was not recorded.
        expected: the version that all rows must have in synchronous training; None: any version.
        max_unscored_share: largest accepted share of rows without values.

    Raises:
        LivenessError: too many rows lack values, or values were computed with other weights.
    """
    unscored = [row for row, each in enumerate(rows) if not each.values]
    if len(unscored) > max_unscored_share * len(rows):
        error = rows[unscored[0]].error or "no reason is given."
        fix = f"remove the cause, or set a larger {SECTION}.max_unscored_share (now {max_unscored_share:g})"
        lost = f"{len(unscored)} of {len(rows)} sequences were not scored. Sequence {unscored[0]}: {error}"
        raise LivenessError(f"{SECTION}: {lost} Fix: {fix}.")
    for row, (each, version) in enumerate(zip(rows, versions, strict=True)):
        if not each.values:
            continue
        have = f"its values have version {each.version}"
        if version is not None and each.version != version:
            sampled = f"the last token of sequence {row} was sampled by version {version} of the weights"
            raise LivenessError(f"{SECTION}: {sampled}, but {have}.")
        if expected is not None and each.version is not None and each.version != expected:
            sampled = f"this step's sequence {row} is sampled by version {expected}: the engine was not synchronised"
            raise LivenessError(f"{SECTION}: {have}, but {sampled}.")


def build_utilities(rows: Sequence[RowValues], response_mask: Tensor) -> BatchUtilities:
    """Place each row's utilities at the last tokens of its episodes.

    Raises:
        LivenessError: values do not match the tokens of their rows, so rows and values were mixed up.
    """
    mask = response_mask.bool()
    values, positions = torch.zeros(mask.shape), torch.zeros_like(mask)
    for row, each in enumerate(rows):
        if not each.values:
            continue
        last = [end - 1 for end in each.ends]
        if len(each.values) != len(last) + 1 or any(not (0 <= at < mask.shape[1] and mask[row, at]) for at in last):
            wrong = f"{len(each.values)} values and episodes that end at {each.ends}, which do not match its tokens"
            raise LivenessError(f"{SECTION}: sequence {row} has {wrong}: sequences and values are mixed up.")
        if last:
            values[row, last] = torch.tensor(each.values).double().diff().float()
            positions[row, last] = True
    return BatchUtilities(rows, values, positions)


def find_waste(found: BatchUtilities, within: float, floor: float) -> Tensor:
    """Find the last tokens of wasted episodes, (n, T) bool. An episode is wasted if |U| <= ``within``.

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
    """Compute the share of (passed, failed) pairs in which the passed row has the higher value; ties count as half.

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
    """Compute the metrics of a batch's values; rows whose reward in ``scores``, (n,), is above 0 count as passed."""
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
    """Compute metrics of what scoring costs.

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
    """Compute the spread of both parts of the advantages over response tokens, and the share of the process part."""
    there = mask.bool()
    own, other = process[there].double(), outcome[there].double()
    total = float(own.abs().sum() + other.abs().sum())
    return {
        "advantage/outcome_std": float(other.std()) if len(other) > 1 else math.nan,
        "advantage/process_std": float(own.std()) if len(own) > 1 else math.nan,
        "advantage/share": float(own.abs().sum()) / total if total else math.nan,
    }


def compute_rank_correlation(one: Tensor, other: Tensor) -> float:
    """Compute Spearman's rank correlation, with mean ranks for ties; NaN if ``one`` or ``other`` does not vary.

    Example:
        >>> compute_rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.9, 0.5]))
        0.5
    """
    ranks = []
    for values in (one.double(), other.double()):
        below = (values[None] < values[:, None]).sum(-1) + 0.5 * (values[None] == values[:, None]).sum(-1)
        ranks.append(below - below.mean())
    scale = math.sqrt(float(ranks[0].square().sum() * ranks[1].square().sum())) if len(one) else 0.0
    return float(ranks[0] @ ranks[1]) / scale if scale > 0 else math.nan


def summarize_continuations(rows: Sequence[RowValues]) -> dict[str, float]:
    """Compute the metrics of a Monte-Carlo check; empty for a batch without a check."""
    chosen = [row for row in rows if row.monte_carlo is not None]
    if not chosen:
        return {}
    pairs = [
        (row.values[row.monte_carlo["number"]], row.monte_carlo["mean"], row.monte_carlo["tokens"])
        for row in chosen
        if row.values and row.monte_carlo and "mean" in row.monte_carlo
    ]
    values, means, tokens = torch.tensor(pairs, dtype=torch.float64).view(-1, 3).unbind(-1)
    return {
        "monte_carlo/prefixes": float(len(pairs)),
        "monte_carlo/lost": float(len(chosen) - len(pairs)),
        "monte_carlo/value": float(means.mean()) if len(pairs) else math.nan,
        "monte_carlo/rank_correlation": compute_rank_correlation(values, means),
        "monte_carlo/tokens": float(tokens.sum()),
    }
