"""Statistics of length by correctness and difficulty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

EASY, HARD = 0.9, 0.1
"""Smallest share of right answers of an easy group, and largest of a hard group."""
CLASSES = ("right", "wrong", "easy", "hard")


def summarize_lengths(tokens: Tensor, right: Tensor, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Compute mean, median and 90th percentile of length for right and wrong answers, easy and hard prompts.

    Args:
        tokens: (S,) response tokens of each session.
        right: (S,) bool.
        groups: sessions of each group.

    Returns:
        ``CLASS/mean``, ``CLASS/p50``, ``CLASS/p90``, NaN for a class without sessions, ``CLASS/sequences``, and
        ``correlation`` of length and correctness within groups, NaN if one of them does not vary.
    """
    members = {name: torch.zeros(len(tokens), dtype=torch.bool) for name in ("easy", "hard")}
    counted = torch.zeros(len(tokens), dtype=torch.bool)
    length, mark = tokens.double().clone(), right.double()
    for sessions in groups.values():
        at = torch.tensor(sessions)
        share = float(right[at].double().mean())
        counted[at] = True
        members["easy"][at] = share >= EASY
        members["hard"][at] = share <= HARD
        length[at] -= length[at].mean()
        mark[at] -= right[at].double().mean()
    chosen = {"right": right.bool() & counted, "wrong": ~right.bool() & counted} | members
    found: dict[str, float] = {}
    for name in CLASSES:
        values = tokens[chosen[name]].double()
        found[f"{name}/sequences"] = float(len(values))
        found[f"{name}/mean"] = float(values.mean()) if len(values) else math.nan
        for share in (50, 90):
            found[f"{name}/p{share}"] = float(values.quantile(share / 100)) if len(values) else math.nan
    length, mark = length[counted], mark[counted]
    scale = float(length.square().sum() * mark.square().sum()) ** 0.5
    return found | {"correlation": float((length * mark).sum()) / scale if scale > 0 else math.nan}
