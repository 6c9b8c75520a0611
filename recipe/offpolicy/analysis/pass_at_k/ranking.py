"""Ranking of checkpoints by pass@k, with intervals that are valid for all pairs of checkpoints simultaneously."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...extensions.pass_at_k.estimators import rank, unbiased, unbiased_dynamic
from ...extensions.pass_at_k.summary import NotIdentified, Stopping, extrapolate, fit, maximise_likelihood
from ..table import Column, Table, to_plain
from .dumps import Counts, name_interval

DRAWS, LEVEL, LEAST_PROMPTS = 2000, 0.95, 10
"""Number of bootstrap draws, level of the intervals, and minimum number of prompts for separating checkpoints."""
FIT_DRAWS = 400


class RankingError(ValueError):
    """The checkpoints cannot be compared."""


@dataclass(frozen=True)
class Place:
    """One checkpoint of a ranking.

    Attributes:
        number: 1 for the first place; checkpoints with equal statistics share a place.
        value: the checkpoint's statistic (see ``Ranking.by``), with the 95 % interval of this statistic alone.
        behind: difference from the first place, with an interval that is valid for all pairs simultaneously.
        may_be_best: whether no other checkpoint is better by a difference whose whole interval lies above 0.
    """

    number: int
    name: str
    value: tuple[float, float, float]
    behind: tuple[float, float, float]
    may_be_best: bool


@dataclass(frozen=True)
class Ranking:
    """Checkpoints in descending order.

    Attributes:
        by: the statistic: unbiased, fit, or Bernoulli, which is only for ranking and not an estimate.
        prompts: number of prompts that all checkpoints have answered.
        pairs: number of comparisons for which the intervals are corrected.
        width: half width of each pair's interval, in units of the pair's standard error.
    """

    k: int
    by: str
    prompts: int
    pairs: int
    width: float
    places: tuple[Place, ...]
    notes: tuple[str, ...]


def rank_checkpoints(
    checkpoints: Sequence[Counts], k: int, *, stopping: Stopping | None = None, draws: int = DRAWS, seed: int = 0
) -> Ranking:
    """Rank checkpoints by pass@k on the prompts that all of them answered.

    One bootstrap over prompts resamples all checkpoints together, so the effect of prompts that are hard for all
    checkpoints cancels. The interval of a pair is its difference +- q standard errors. Here, q is the 95 % quantile of
    the largest |deviation| / standard error over all pairs (max-t). The probability that any interval misses is
    therefore 5 %, and so is the probability that the best checkpoint is not among those that may be best.

    Raises:
        RankingError: fewer than two checkpoints, no common prompt, or a fit that is not identified.
        ValueError: the counts are impossible under the stopping rule.
    """
    if len(checkpoints) < 2:
        raise RankingError("a ranking needs the dumps of two or more checkpoints.")
    common = set.intersection(*(set(each.prompts) for each in checkpoints))
    if not common:
        raise RankingError("the checkpoints have no prompt in common, so they cannot be compared.")
    order = sorted(common)
    counts = torch.tensor([_select(each, order) for each in checkpoints])
    by, notes = _choose(counts, k, stopping)
    weights = _draw(len(order), FIT_DRAWS if by == "fit" else draws, seed)
    own, drawn = (_fit if by == "fit" else _average)(counts, k, weights, by, stopping)
    few = len(order) < LEAST_PROMPTS
    if dropped := max(len(each.prompts) for each in checkpoints) - len(order):
        notes.append(f"{dropped} prompts that not all checkpoints answered are left out.")
    if few:
        notes.append(f"{len(order)} prompts: too few to separate checkpoints; at least {LEAST_PROMPTS} are needed.")
    differences, errors, width = _compare(own, drawn)
    margin = torch.full_like(errors, math.inf) if few else width * errors
    ends = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    best = (differences + margin >= 0).all(1)
    falling = sorted(range(len(checkpoints)), key=lambda at: (-float(own[at]), checkpoints[at].name))
    first = falling[0]
    places = tuple(
        Place(
            1 + int((own > own[at] + 1e-12).sum()),
            checkpoints[at].name,
            (float(own[at]), *((math.nan, math.nan) if few else (float(ends[0, at]), float(ends[1, at])))),
            _interval(float(differences[at, first]), 0.0 if at == first else float(margin[at, first])),
            bool(best[at]),
        )
        for at in falling
    )
    pairs = len(checkpoints) * (len(checkpoints) - 1) // 2
    return Ranking(k, by, len(order), pairs, width, places, tuple(notes))


def _interval(value: float, margin: float) -> tuple[float, float, float]:
    ends = (value - margin, value + margin)
    return (value, *ends) if math.isfinite(margin) else (value, math.nan, math.nan)


def _select(checkpoint: Counts, order: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    found = dict(zip(checkpoint.prompts, zip(checkpoint.n, checkpoint.c, strict=True), strict=True))
    return [found[prompt] for prompt in order]


def _choose(counts: Tensor, k: int, stopping: Stopping | None) -> tuple[str, list[str]]:
    """Choose the statistic for counts of shape (M, P, 2), with notes on the choice."""
    samples = counts[..., 0]
    least, most = int(samples.min()), int(samples.max())
    if k <= (stopping.looks[-1] if stopping else least):
        return "unbiased", []
    if stopping is None and least == most:
        return "Bernoulli", [
            f"k={k} is more than the {least} samples: 1 - (1 - c/n)^k ranks checkpoints, but does not estimate "
            f"pass@{k}. The larger k is, the more the ranking depends on the share of prompts with a correct sample."
        ]
    varied = (
        "" if stopping else f" Prompts have {least} to {most} samples, and 1 - (1 - c/n)^k depends on their number."
    )
    return "fit", [f"k={k} is more than the samples: pass@k is extrapolated by a Beta-binomial fit.{varied}"]


def _draw(prompts: int, draws: int, seed: int) -> Tensor:
    """Draw the number of times that each prompt occurs in each resample, (D, P) float64."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(prompts, (draws, prompts), generator=generator)
    weights = torch.zeros(draws, prompts, dtype=torch.float64)
    return weights.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))


def _average(counts: Tensor, k: int, weights: Tensor, by: str, stopping: Stopping | None) -> tuple[Tensor, Tensor]:
    """Compute mean estimates over prompts, (M,), and the same for each draw, (M, D)."""

    def estimate(n: int, c: int) -> float:
        if by == "Bernoulli":
            return rank(n, c, k).value
        if stopping is None:
            return unbiased(n, c, k)
        return unbiased_dynamic(stopping.looks, n, c, k, successes=stopping.successes)

    values = torch.tensor([[estimate(n, c) for n, c in each] for each in counts.tolist()], dtype=torch.float64)
    return values.mean(1), values @ weights.T / weights.shape[1]


def _fit(counts: Tensor, k: int, weights: Tensor, by: str, stopping: Stopping | None) -> tuple[Tensor, Tensor]:
    """Compute the fit's pass@k, (M,), and the same for each draw in which all checkpoints are identified, (M, D)."""
    own, drawn, found = [], [], torch.ones(len(weights), dtype=torch.bool)
    for each in counts.double():
        try:
            own.append(extrapolate(*fit(each[:, 0], each[:, 1]), k))
        except NotIdentified as error:
            raise RankingError(f"k={k} is more than the samples, and the fit is not identified: {error}") from error
        pairs, place = torch.unique(each, dim=0, return_inverse=True)
        of_pairs = torch.zeros(len(weights), len(pairs), dtype=torch.float64).index_add_(1, place, weights)
        a, b, identified = maximise_likelihood(pairs[:, 0], pairs[:, 1], of_pairs)
        found &= identified
        drawn.append(1 - (torch.lgamma(b + k) - torch.lgamma(b) - torch.lgamma(a + b + k) + torch.lgamma(a + b)).exp())
    if float(found.double().mean()) < LEVEL:
        raise RankingError(f"k={k}: the fit is not identified in enough resamples of the prompts. Sample more.")
    return torch.tensor(own, dtype=torch.float64), torch.stack(drawn)[:, found]


def _compare(own: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, float]:
    """Compute differences (M, M), their standard errors (M, M), and the quantile q of ``rank_checkpoints``."""
    differences = own[:, None] - own[None]
    drawn = drawn[:, None] - drawn[None]
    errors = drawn.std(-1)
    # If the standard error of a pair is 0, its difference does not vary at all.
    varies = (errors > 1e-12)[..., None]
    scaled = (drawn - differences[..., None]).abs() / errors.clamp(min=1e-12)[..., None]
    largest = torch.where(varies, scaled, 0.0).amax((0, 1))
    return differences, errors, float(torch.quantile(largest, LEVEL))


def build_ranking(found: Ranking) -> Table:
    """Build the table of a ranking."""
    columns = [
        *(Column(name) for name in ("place", "checkpoint", f"pass@{found.k}", "low", "high")),
        *(Column(name) for name in ("behind first", "low", "high", "may be best")),
    ]
    rows = [
        [each.number, each.name, *each.value, *each.behind, "yes" if each.may_be_best else "no"]
        for each in found.places
    ]
    return Table(columns, rows, f"Ranking by pass@{found.k} ({found.by}), {found.prompts} common prompts")


def build_places(found: Ranking) -> dict[str, dict[str, object]]:
    """Build the JSON of each checkpoint's place, by its name."""
    shared = {"k": found.k, "by": found.by, "pairs": found.pairs, "width": found.width, "notes": list_notes(found)}
    places = {
        each.name: {
            "place": each.number,
            "value": name_interval(each.value),
            "behind_first": name_interval(each.behind),
            "may_be_best": each.may_be_best,
            **shared,
        }
        for each in found.places
    }
    return dict(to_plain(places))


def list_notes(found: Ranking) -> list[str]:
    """List the notes that help to interpret a ranking."""
    return [
        *found.notes,
        f"{len(found.places)} checkpoints, {found.pairs} pairs: the intervals of differences from the first "
        f"checkpoint are simultaneous over all pairs, at 95 % (+- {found.width:.2f} standard errors). The best "
        "checkpoint is one of those that may be best, at 95 %. The value of the checkpoint in first place is too "
        "high on average, because the same samples selected it.",
    ]
