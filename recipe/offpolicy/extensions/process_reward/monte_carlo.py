"""Monte-Carlo values of a few prefixes (mean rewards of complete rollouts from there), to check log-prob values.

This is VinePPO's estimate of V(prefix) (arXiv:2410.01679), which is unbiased but too expensive for every prefix.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .prefix_scorer import RowValues
from .settings import MonteCarloSettings

Sample = Callable[[list[int], int, int], Awaitable[list[int] | None]]
"""Continues (ids, most tokens, seed) with the policy that sampled the ids; None after an abort or a weight change."""
Score = Callable[[list[int]], Awaitable[float]]
"""Reward of a whole response."""


def choose_prefix(
    settings: MonteCarloSettings, version: int | None, response: Sequence[int], ends: Sequence[int]
) -> tuple[int, random.Random] | None:
    """Choose which prefix of a row to check, V_0 included, and the source of seeds; None if the row is not checked.

    The choice depends only on the version and the response, so it is the same in every worker.
    """
    if settings.every is None or version is None or version % settings.every:
        return None
    source = random.Random(f"{version} {list(response)}")
    return (source.randint(0, len(ends)), source) if source.random() < settings.share else None


async def continue_prefix(
    prompt: Sequence[int],
    prefix: Sequence[int],
    most: int,
    sample: Sample,
    score: Score,
    *,
    samples: int,
    source: random.Random,
) -> dict[str, Any]:
    """Sample ``samples`` responses of up to ``most`` tokens that begin with ``prefix``, and reward them.

    Returns:
        The rewards' ``mean`` and the number of sampled ``tokens``, or the ``error`` that prevented them.
    """
    room = most - len(prefix)
    ids = [*prompt, *prefix]
    found = await asyncio.gather(*(sample(ids, room, source.getrandbits(31)) for _ in range(samples if room else 0)))
    whole = [[*prefix, *more] for more in found if more is not None]
    if not room:
        return {"error": "the prefix has the maximum response length."}
    if len(whole) < samples:
        return {
            "error": f"{samples - len(whole)} of {samples} continuations were aborted, or sampled by other weights."
        }
    rewards = await asyncio.gather(*map(score, whole))
    if not all(map(math.isfinite, rewards)):
        return {"error": "the reward of a continuation is not finite."}
    return {"mean": math.fsum(rewards) / samples, "tokens": sum(map(len, whole)) - samples * len(prefix)}


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
