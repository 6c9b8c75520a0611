"""Length penalties of one group, as amounts by which rewards or advantages are lowered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ...batch.safe_values import measure_spread

EPSILON = 1e-6
"""verl's constant, added to the standard deviation."""


def compute_shift(penalty: Tensor, scores: Tensor, groups: Mapping[str, Sequence[int]], *, by_std: bool) -> Tensor:
    """Compute the decrease of advantages after normalisation, (P_i - mean P) / s in each group, (S,) float64.

    s is the standard deviation by which verl has divided the group's rewards, and 1 if these agree within float32
    rounding, so that the coefficient keeps its meaning in such groups. If penalties differ by more than rewards, 1 / s
    is bounded: no shift exceeds the larger of two values, the group's largest advantage in verl (at most sqrt(n - 1)
    for n rows) and the largest |P_i - mean P|. The groups' mean advantages are unchanged.

    Args:
        penalty: (S,) penalty of each session.
        scores: (S,) raw rewards.
        groups: sessions of each group; other sessions are not shifted.
        by_std: verl divides by the standard deviation.
    """
    shift = torch.zeros_like(penalty)
    for members in groups.values():
        at = torch.tensor(members)
        centred = penalty[at] - penalty[at].mean()
        shift[at] = centred * (_compute_factor(scores[at], float(centred.abs().max())) if by_std else 1.0)
    return shift


def _compute_factor(scores: Tensor, largest: float) -> float:
    """Compute 1 / s for one group whose penalties differ by at most ``largest`` from their mean."""
    scores = scores.double()
    spread = measure_spread(scores, centred=True)
    verls = 1 / (spread.value + EPSILON)
    own = spread.certainty * verls * float((scores - scores.mean()).abs().max())
    bound = max(1.0, own / largest) if largest > 0 else 1.0
    return spread.certainty * min(verls, bound) + (1 - spread.certainty)


def compare_rewards(scores: Tensor, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Compute how certainly each group's rewards differ, in [0, 1]: 0 if they agree within float32 rounding."""
    return {name: measure_spread(scores[torch.tensor(at)], centred=True).certainty for name, at in groups.items()}


Kind = Literal["uniform", "group", "anchor", "reference"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def penalties(
    kind: Kind | str,
    lengths: Tensor | Sequence[float],
    right: Tensor | Sequence[bool],
    *,
    coefficient: float,
    anchor: float | None = None,
) -> Tensor:
    """Compute the penalties of one group, (N,) float64, positive where the reward is lowered, and not capped.

    ``uniform``: coefficient T. ``group``: with lam = 1/2 - (T - min) / (max - min), -coefficient lam for a right row
    and -coefficient min(0, lam) for a wrong one, 0 if all rows are equally long (Kimi k1.5, arXiv 2501.12599, section
    2.3.3). ``anchor``: coefficient max(0, (T - A) / A), 0 without an anchor; ``reference``: the same with a given
    length as A. Neither divides by less than one token.

    Args:
        lengths: (N,) response tokens T.
        right: (N,) bool, or 0 and 1.
        coefficient: 0 or more.
        anchor: A, above 0; None: there is none yet.

    Raises:
        ValueError: an unknown kind, or invalid numbers.

    Example:
        >>> penalties("group", [100, 300, 500], [True, True, False], coefficient=0.1).tolist()
        [-0.05, 0.0, 0.05]
        >>> penalties("anchor", [100, 300, 500], [True, True, False], coefficient=0.1, anchor=200).tolist()
        [0.0, 0.05, 0.15000000000000002]
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind}: not one of {', '.join(KINDS)}.")
    tokens, marks = (torch.as_tensor(values).cpu().double() for values in (lengths, right))
    if tokens.dim() != 1 or tokens.shape != marks.shape:
        raise ValueError(f"{tuple(tokens.shape)} lengths and {tuple(marks.shape)} marks: expected one of each per row.")
    if not bool((torch.isfinite(tokens) & (tokens >= 0)).all()):
        raise ValueError(f"lengths {tokens.tolist()}: expected 0 tokens or more.")
    if not bool(((marks == 0) | (marks == 1)).all()):
        raise ValueError(f"marks {marks.tolist()}: expected right or wrong, 1 or 0.")
    if not (math.isfinite(coefficient) and coefficient >= 0):
        raise ValueError(f"coefficient={coefficient}: expected 0 or more.")
    if anchor is not None and not (math.isfinite(anchor) and anchor > 0):
        raise ValueError(f"anchor={anchor}: expected a length above 0, or None.")
    if kind == "uniform":
        return coefficient * tokens
    if kind == "group":
        return 0.0 - coefficient * _standing(tokens, marks.bool())
    if anchor is None:
        return torch.zeros_like(tokens)
    return coefficient * ((tokens - anchor) / max(anchor, 1.0)).clamp(min=0)


def _standing(tokens: Tensor, right: Tensor) -> Tensor:
    """Compute lam, from 1/2 for the shortest row to -1/2 for the longest; a wrong row never gains from it."""
    if len(tokens) == 0:
        return torch.zeros_like(tokens)
    least, most = tokens.amin(), tokens.amax()
    # Lengths are whole tokens, so a range below 1 is 0.
    standing = ((least + most) / 2 - tokens) / (most - least).clamp(min=1)
    return torch.where(right, standing, standing.clamp(max=0))
