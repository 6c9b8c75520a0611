"""Statistics with their own reductions, so that they add up over micro-batches and ranks, and a catalogue of them.

A mean is sent as a sum and a count, and an effective sample size as two sums and a count. Nothing is averaged twice.
"""

from __future__ import annotations

import math
import pickle
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import product
from typing import Any, Final

from torch import Tensor


class Reduction(Enum):
    """Rule by which two statistics with the same name are merged; the comments list the parts."""

    SUM = "sum"  # (total,)
    MEAN = "mean"  # (total, count)
    STD = "std"  # (total, square, count), taken about 1 for ratios and about 0 otherwise
    ESS = "ess"  # (total, square, count), taken about 1
    CHI2 = "chi2"  # (total, square, count), taken about 1
    PERPLEXITY = "perplexity"  # (total of log-probs, count)
    MIN = "min"  # (value, count), the value is meaningless if the count is 0
    MAX = "max"  # (value, count), as for MIN


_EXTREMES: Final = (Reduction.MIN, Reduction.MAX)
_LEAST_SQUARE: Final = 2.0**-40
"""Mean square of weights up to which the effective sample size is NaN, because moments about 1 are rounded to 2^-52 per
weight."""


@dataclass(frozen=True)
class Statistic:
    """A metric as mergeable partial sums.

    Attributes:
        reduction: rule by which parts are merged.
        parts: 0-dim float64 tensors on the device, floats once the statistic has been copied to the host.
        about: number that was subtracted from each value before the mean, minimum or maximum was computed.
    """

    reduction: Reduction
    parts: tuple[Tensor | float, ...]
    about: float = 0.0

    def merge(self, *others: Statistic) -> Statistic:
        """Merge with the statistics of other samples (host side), in one pass over all of them."""
        every = (self, *others)
        if wrong := {one.reduction for one in others} - {self.reduction}:
            raise ValueError(f"cannot merge {self.reduction.value} with {wrong.pop().value}")
        columns = list(zip(*(one.parts for one in every), strict=True))
        if self.reduction in _EXTREMES:
            return replace(self, parts=_find_extreme(self.reduction, *columns))
        return replace(self, parts=tuple(map(sum, columns)))

    def value(self) -> float:
        """Compute the number to log; NaN for a statistic without values, but 0 for a sum."""
        parts = [float(part) for part in self.parts]
        match self.reduction:
            case Reduction.SUM:
                return parts[0]
            case _ if not parts[-1]:
                return math.nan
            case Reduction.MIN | Reduction.MAX:
                return self.about + parts[0]
            case Reduction.MEAN:
                return self.about + parts[0] / parts[1]
            case Reduction.PERPLEXITY:
                return _exp(-parts[0] / parts[1])
        total, square, count = parts
        match self.reduction:
            case Reduction.STD:
                return math.sqrt(max(square / count - (total / count) ** 2, 0.0))
            case Reduction.CHI2:
                # E[w^2] - 1 = E[(w-1)^2] + 2 E[w-1]: no number near 1 is subtracted from 1.
                return (square + 2 * total) / count
            case _:
                # (sum w)^2 / (n sum w^2), in (0, 1]: the share of the sample that is effective under the weights.
                weights, squares = count + total, count + 2 * total + square
                return weights * weights / (count * squares) if squares > _LEAST_SQUARE * count else math.nan


@dataclass(frozen=True)
class Moments:
    """Partial sums over a sample of weights w, computed from w - 1, which loses no digits if w is near 1.

    Each attribute is a 0-dim float64 tensor.

    Attributes:
        excess: sum of w - 1.
        square: sum of (w - 1)^2.
        count: number of weights.
        least, greatest: least and greatest w - 1; meaningless without weights.
    """

    excess: Tensor
    square: Tensor
    count: Tensor
    least: Tensor
    greatest: Tensor

    def build_statistics(self, name: str) -> dict[str, Statistic]:
        """Build mean, std, min, max, ess and chi2 under ``name``."""
        sums = (self.excess, self.square, self.count)
        return {
            f"{name}/mean": Statistic(Reduction.MEAN, (self.excess, self.count), about=1.0),
            f"{name}/std": Statistic(Reduction.STD, sums),
            f"{name}/min": Statistic(Reduction.MIN, (self.least, self.count), about=1.0),
            f"{name}/max": Statistic(Reduction.MAX, (self.greatest, self.count), about=1.0),
            f"{name}/ess": Statistic(Reduction.ESS, sums),
            f"{name}/chi2": Statistic(Reduction.CHI2, sums),
        }


def build_sum(value: Tensor) -> Statistic:
    """Build a statistic that is a sum.

    Example:
        >>> import torch
        >>> build_sum(torch.tensor(3.0)).value()
        3.0
    """
    return Statistic(Reduction.SUM, (value,))


def build_mean(value: Tensor, count: Tensor, about: float = 0.0) -> Statistic:
    """Build a mean, or a share of a whole, from a sum and a count.

    Example:
        >>> import torch
        >>> build_mean(torch.tensor(3.0), torch.tensor(4.0)).value()
        0.75
    """
    return Statistic(Reduction.MEAN, (value, count), about)


class FlatStatistics(Mapping[str, Statistic]):
    """Statistics by name, stored in only two plain objects, whatever their number: a layout and the numbers.

    They are sent in this form because separate objects for the statistics of all ranks would be so numerous that
    garbage collection would take longer than the computation. A layout is read only once, because ranks and steps
    usually share it.

    Attributes:
        layout: the pickled statistics without their parts, and the position of each part among the numbers.
        numbers: numbers of all parts; statistics with the same parts and the same reduction share the same numbers.
    """

    def __init__(self, layout: bytes, numbers: bytes) -> None:
        self.layout, self.numbers = layout, array("d", numbers)

    def __reduce__(self) -> tuple[type[FlatStatistics], tuple[bytes, bytes]]:
        return FlatStatistics, (self.layout, self.numbers.tobytes())

    def __getitem__(self, name: str) -> Statistic:
        one, at = _read_layout(self.layout)[name]
        return replace(one, parts=tuple(self.numbers[at]))

    def __iter__(self) -> Iterator[str]:
        return iter(_read_layout(self.layout))

    def __len__(self) -> int:
        return len(_read_layout(self.layout))


def flatten(statistics: Mapping[str, Statistic]) -> Mapping[str, Statistic]:
    """Flatten statistics that are on the host; an empty or flat mapping is returned unchanged.

    Example:
        >>> flat = flatten({"x": Statistic(Reduction.MEAN, (2.0, 1.0)), "n": Statistic(Reduction.SUM, (3.0,))})
        >>> flat["x"].value(), list(flat.numbers)
        (2.0, [2.0, 1.0, 3.0])
    """
    if isinstance(statistics, FlatStatistics) or not statistics:
        return statistics
    numbers = array("d")
    places: dict[tuple[Reduction, int], slice] = {}
    layout = {}
    held = dict(statistics)  # keeps the objects alive, so that their ids stay unique
    for name, one in held.items():
        key = (one.reduction, id(one.parts))
        if key not in places:
            start = len(numbers)
            numbers.extend(map(float, one.parts))
            places[key] = slice(start, len(numbers))
        layout[name] = (replace(one, parts=()), places[key])
    return FlatStatistics(pickle.dumps(layout), numbers.tobytes())


@lru_cache(maxsize=16)
def _read_layout(layout: bytes) -> dict[str, tuple[Statistic, slice]]:
    read: dict[str, tuple[Statistic, slice]] = pickle.loads(layout)
    return read


def merge_all(samples: Iterable[Mapping[str, Statistic]]) -> dict[str, Statistic]:
    """Merge statistics by name over micro-batches, mini-batches and ranks (host side).

    Statistics with the same reduction that share their parts in every sample also share them in the result.

    Example:
        >>> parts = [{"x": Statistic(Reduction.MEAN, (2.0, 1.0))}, {"x": Statistic(Reduction.MEAN, (1.0, 2.0))}]
        >>> merge_all(parts)["x"].value()  # (2 + 1) / (1 + 2)
        1.0
    """
    given = [sample for sample in samples if sample]
    flat = [sample for sample in given if isinstance(sample, FlatStatistics)]
    if len(given) == len(flat) > 1 and all(sample.layout == flat[0].layout for sample in flat):
        return _merge_columns(flat)
    by_name: dict[str, list[Statistic]] = {}
    for sample in given:
        for name, statistic in sample.items():
            by_name.setdefault(name, []).append(statistic)
    merged: dict[str, Statistic] = {}
    shared: dict[tuple[Any, ...], Statistic] = {}
    for name, found in by_name.items():
        first, *others = found
        key = tuple((one.reduction, id(one.parts)) for one in found)
        if not others:
            merged[name] = first
        elif key in shared:
            merged[name] = replace(first, parts=shared[key].parts)
        else:
            merged[name] = shared[key] = first.merge(*others)
    return merged


def _merge_columns(samples: Sequence[FlatStatistics]) -> dict[str, Statistic]:
    """Merge statistics with the same layout, number by number."""
    columns = list(zip(*(sample.numbers for sample in samples), strict=True))
    # This uses Python's sum, in the order of the samples, as ``Statistic.merge`` does.
    sums = tuple(map(sum, columns))
    return {
        name: replace(one, parts=_find_extreme(one.reduction, *columns[at]) if one.reduction in _EXTREMES else sums[at])
        for name, (one, at) in _read_layout(samples[0].layout).items()
    }


def _find_extreme(reduction: Reduction, values: Sequence[Any], counts: Sequence[Any]) -> tuple[Any, Any]:
    """Find the least or greatest value with a count other than 0, or else the first; also return the total count."""
    extreme = min if reduction is Reduction.MIN else max
    counted = [value for value, count in zip(values, counts, strict=True) if count]
    return extreme(counted) if counted else values[0], sum(counts)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


BUCKETS: Final = {"le16": 16, "le64": 64, "le256": 256, "le1024": 1024, "le4096": 4096, "gt4096": None}
"""Length bucket -> largest number of valid tokens in its rows; None: no limit."""

SIGNS: Final = ("positive", "negative")
TURNS: Final = ("first", "post_tool")
STALENESS: Final = ("is0", "is1", "is2", "ge3")

_DISTRIBUTION: Final = {part: Reduction(part) for part in ("mean", "std", "min", "max", "ess", "chi2")}


@dataclass(frozen=True)
class StatisticEntry:
    """Entry of the catalogue: metric keys that share one meaning.

    Attributes:
        key: under ``offpolicy/``; {a,b} stands for each of a and b, and <name> for any name.
        parts: last part of the key -> its reduction.
        meaning: one-line description.
    """

    key: str
    parts: Mapping[str, Reduction]
    meaning: str

    def expand(self) -> Iterator[tuple[str, Reduction]]:
        """Yield each key, with <name> unchanged, and its reduction."""
        pieces = [piece.split(",") for piece in self.key.replace("{", "\0").replace("}", "\0").split("\0")]
        for chosen in product(*pieces):
            for part, reduction in self.parts.items():
                yield f"{''.join(chosen)}/{part}", reduction

    def format_row(self) -> str:
        """Format the entry as a row of a Markdown table."""
        parts = ",".join(self.parts)
        key = f"{self.key}/{{{parts}}}" if len(self.parts) > 1 else f"{self.key}/{parts}"
        reductions = list(dict.fromkeys(reduction.value for reduction in self.parts.values()))
        return f"| `{key}` | {self.meaning} | {', '.join(reductions)} |"


def _group(names: tuple[str, ...] | Mapping[str, object]) -> str:
    return "{" + ",".join(names) + "}"


def _means(*parts: str) -> dict[str, Reduction]:
    return dict.fromkeys(parts, Reduction.MEAN)


_BY_DRIFT: Final = {"token_count": Reduction.SUM, "kl_k3": Reduction.MEAN}
_MASKED: Final = _means("masked_token_share", "masked_sequence_share")

ENTRIES: Final = (
    StatisticEntry(
        "{rollout_ratio,ppo_ratio,full_ratio}",
        _DISTRIBUTION,
        "pi_old / mu, pi / pi_old and pi / mu per token; ess = (sum r)^2 / (n sum r^2), chi2 = mean r^2 - 1",
    ),
    StatisticEntry("rollout_ratio_sequence", _DISTRIBUTION, "pi_old / mu per sequence: exp of the summed log-ratio"),
    StatisticEntry(
        "log_prob_difference", _means("mean", "abs_mean") | {"std": Reduction.STD}, "log pi_old - log mu, nats"
    ),
    StatisticEntry(
        "kl", _means("k1", "k3"), "estimates of KL(mu, pi_old), nats per token: mean of -log r and of r - 1 - log r"
    ),
    StatisticEntry(
        "perplexity",
        dict.fromkeys(("rollout", "old", "current"), Reduction.PERPLEXITY),
        "exp(-mean log-prob) of the sampled tokens under mu, pi_old and pi",
    ),
    StatisticEntry(
        "weight",
        _DISTRIBUTION | _means("truncated_share"),
        "the applied weight per token, 0 if rejected; share of tokens whose raw weight is outside the bounds",
    ),
    StatisticEntry("raw_weight", _DISTRIBUTION, "the weight before bounds and normalisation, if one is configured"),
    StatisticEntry("penalty", _means("mean"), "(log r)^2 per token of the penalised ratio, if there is a penalty"),
    StatisticEntry(
        "keep",
        _means("token_share", "sequence_share", "token_mask_ratio"),
        "share of response tokens kept, of sequences with a kept token, and of response tokens that masks of level "
        "token reject",
    ),
    StatisticEntry(
        f"keep/{_group(SIGNS)}", _means("token_share", "sequence_share"), "by the sign of the sequence's mean advantage"
    ),
    StatisticEntry(
        "{mask/<name>,weights/<name>,weight}",
        _MASKED,
        "for each mask, and for a weight of kind reject: the share that it rejects on its own, out of the response "
        "tokens and sequences that it covers; a mask on pi / pi_old or on age also covers tokens without mu",
    ),
    StatisticEntry(
        f"{{mask/<name>,weights/<name>,weight}}/{_group(SIGNS)}",
        _MASKED,
        "by the sign of the sequence's mean advantage",
    ),
    StatisticEntry(
        f"length/{_group(BUCKETS)}",
        {"sequences": Reduction.SUM}
        | _means("keep_token_share", "keep_sequence_share", "geometric_keep_share", "product_keep_share"),
        "sequences of T <= 16, 17 to 64, ...: number, kept shares, and the shares that a geometric mask [0.99, 1.01] "
        "and a product mask [0.5, 2] on pi_old / mu would keep",
    ),
    StatisticEntry(
        f"turn/{_group(TURNS)}",
        _BY_DRIFT | _means("keep_token_share"),
        "tokens of the first turn, and after a tool's output: number, KL(mu, pi_old) by k3, kept share",
    ),
    StatisticEntry(
        f"turn/{_group(TURNS)}/rollout_ratio",
        {"mean": Reduction.MEAN, "std": Reduction.STD},
        "pi_old / mu of these tokens",
    ),
    StatisticEntry(
        "staleness",
        {"mean": Reduction.MEAN, "max": Reduction.MAX},
        "weight versions between sampling and use, per token if versions are recorded per token, else per sequence",
    ),
    StatisticEntry(
        f"staleness/{_group(STALENESS)}",
        _BY_DRIFT | _means("keep_token_share"),
        "tokens with staleness 0, 1, 2, 3 or more: the same quantities as for turns",
    ),
    StatisticEntry(
        "nonfinite",
        dict.fromkeys(("rollout_log_prob", "old_log_prob", "log_prob", "advantages"), Reduction.SUM),
        "number of non-finite response tokens; those of mu and pi_old are excluded where they are read, the others "
        "stop the run",
    ),
)

SHADOW_ENTRIES: Final = (
    StatisticEntry(
        "shadow/<option>",
        _means("keep_token_share", "keep_sequence_share"),
        "share that an inactive correction would have kept",
    ),
    StatisticEntry(
        f"shadow/<option>/{_group((*SIGNS, *(f'turn/{turn}' for turn in TURNS)))}",
        _means("keep_token_share"),
        "by the sign of the sequence's mean advantage, and by turn",
    ),
    StatisticEntry(f"shadow/<option>/length/{_group(BUCKETS)}", _means("keep_sequence_share"), "by T"),
    StatisticEntry(
        "shadow/<option>/weight",
        _means("mean", "truncated_share") | {"ess": Reduction.ESS},
        "its weight, if it has one",
    ),
)


def format_markdown() -> str:
    """Format all statistics as the Markdown table of docs/metrics.md.

    Example:
        >>> format_markdown().splitlines()[0]
        '| key | meaning | reduction |'
    """
    rows = (entry.format_row() for entry in (*ENTRIES, *SHADOW_ENTRIES))
    return "\n".join(("| key | meaning | reduction |", "|---|---|---|", *rows)) + "\n"
