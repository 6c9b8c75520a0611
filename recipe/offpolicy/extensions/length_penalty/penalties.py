"""Length penalties of one group, as amounts by which rewards are lowered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

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
    """Compute the penalties of one group, (N,) float64, positive where the reward is lowered; no cap.

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
