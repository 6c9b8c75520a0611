"""Teacher signals: K1 as an advantage and K2 as a loss, with the gap between student and teacher bounded.

With s and t the log-probs of student and teacher for the same sampled token, K1 = s - t estimates the reverse KL and
K2 = (s - t)^2 / 2 has its gradient, (s - t) grad s (Schulman 2020, Approximating KL divergence). The gradient of K1
does not depend on the teacher, so K1 is used as an advantage and never as a loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...batch.spread import measure_spread

LOG_PROBS = 1.0
"""Typical size of log-probs in nats: gaps are their differences, with the rounding of numbers of this size."""


def find_horizon(tokens: Tensor, horizon: int | None) -> Tensor:
    """Find each row's first ``horizon`` of ``tokens`` (B, T) bool; None: all of them.

    Raises:
        ValueError: the horizon is not 1 or more.
    """
    if horizon is not None and horizon < 1:
        raise ValueError(f"horizon={horizon}: expected 1 or more, or None for all tokens.")
    return tokens if horizon is None else tokens & (tokens.cumsum(-1) <= horizon)


def compute_gaps(student: Tensor, teacher: Tensor, tokens: Tensor, *, max_gap: float) -> Tensor:
    """Compute s - t bounded to [-max_gap, max_gap], (B, T), 0 outside ``tokens``; a teacher's -inf counts as max_gap.

    Raises:
        ValueError: a log-prob of such a token is not a number, shapes differ, or ``max_gap`` is not above 0.
    """
    shapes = [tuple(each.shape) for each in (student, teacher, tokens)]
    if len(set(shapes)) > 1:
        raise ValueError(f"student, teacher and mask have the shapes {shapes}: expected one shape.")
    if not 0 < max_gap < math.inf:
        raise ValueError(f"max_gap={max_gap}: not a finite number of nats above 0.")
    gap = torch.where(tokens, student - teacher, 0.0)
    if torch.isnan(gap).any():
        row, place = (int(index) for index in torch.isnan(gap).nonzero()[0])
        raise ValueError(f"the gap of token {place} of row {row} is not a number: the token was not scored.")
    return gap.clamp(-max_gap, max_gap)


def compute_factor(value: float, *, start: float, end: float, final: float) -> float:
    """Compute the factor of a scheduled coefficient: 1 up to ``start``, ``final`` from ``end`` on, linear in between.

    Example:
        >>> [compute_factor(gap, start=2.0, end=1.0, final=0.5) for gap in (3.0, 1.5, 0.2)]
        [1.0, 0.75, 0.5]
    """
    return 1 + (final - 1) * min(max((value - start) / (end - start), 0.0), 1.0)


def compute_centre(gaps: Tensor, tokens: Tensor, scale: str | float) -> float:
    """Compute what is subtracted from the gaps before they are scaled: their mean with ``mean_std``, otherwise 0."""
    chosen = gaps[tokens].double()
    return float(chosen.mean()) if scale == "mean_std" and len(chosen) else 0.0


def compute_scale(gaps: Tensor, tokens: Tensor, scale: str | float) -> float:
    """Compute the divisor of the signal over a whole batch: the spread of ``gaps``, 1.0, or a number.

    ``mean_std`` is the standard deviation about the mean that ``compute_centre`` returns.
    ``std`` is the deviation about 0, because nothing is centred: a teacher that finds all tokens less likely than the
    student does teaches that as well. Over n tokens no gap exceeds sqrt(n) times it. 1.0 if all gaps are float32
    rounding.

    Raises:
        ValueError: neither std, mean_std, none nor a finite number above 0.
    """
    if scale == "none":
        return 1.0
    if scale in ("std", "mean_std"):
        return 1 / measure_spread(gaps[tokens], centred=scale == "mean_std", size=LOG_PROBS).invert(otherwise=1.0)
    if isinstance(scale, str) or not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}: not std, mean_std, none or a finite number above 0.")
    return float(scale)


def advantages(
    base: Tensor,
    student: Tensor,
    teacher: Tensor,
    eligible_tokens: Tensor,
    *,
    coef: float,
    max_gap: float,
    scale: str | float,
    horizon: int | None = None,
    centre: float | None = None,
) -> Tensor:
    """Replace the advantages of eligible tokens by -coef (gap - centre) / scale, (B, T), with gap = s - t.

    Args:
        base: (B, T) advantages of the estimator, bitwise unchanged elsewhere.
        student, teacher: (B, T) log-probs of the sampled tokens; read only at eligible tokens within the horizon.
        eligible_tokens: (B, T) bool.
        coef: factor of the signal.
        max_gap: bound of |s - t|, in nats.
        scale: ``std``, the root mean square of the bounded gaps over the whole batch, ``mean_std``, ``none``, or a
            number; see ``compute_scale``.
        horizon: number of tokens of a row that take part, from its first eligible one; later ones get 0, and enter no
            statistic.
        centre: subtracted from the gaps; None: as ``compute_centre``.

    Raises:
        ValueError: a required log-prob is not a number, shapes differ, or a setting is malformed.

    Example:
        >>> base, t = torch.tensor([[0.5, 0.5, 0.5]]), torch.tensor([[-1.0, -4.0, -2.0]])
        >>> on = torch.tensor([[False, True, True]])
        >>> advantages(base, torch.full((1, 3), -1.0), t, on, coef=1.0, max_gap=2.0, scale="none", horizon=1)
        tensor([[ 0.5000, -2.0000,  0.0000]])
    """
    if not math.isfinite(coef):
        raise ValueError(f"coef={coef}: not a finite number.")
    if base.shape != eligible_tokens.shape:
        raise ValueError(f"{tuple(base.shape)} advantages for a mask of {tuple(eligible_tokens.shape)}.")
    eligible_tokens = eligible_tokens.bool()
    near = find_horizon(eligible_tokens, horizon)
    gaps = compute_gaps(student.detach(), teacher, near, max_gap=max_gap)
    middle = compute_centre(gaps, near, scale) if centre is None else centre
    signal = (gaps - middle) * (-coef / compute_scale(gaps, near, scale))
    return torch.where(eligible_tokens, torch.where(near, signal, 0.0).to(base.dtype), base)


def k2_loss(student: Tensor, teacher: Tensor, mask: Tensor, *, max_gap: float) -> Tensor:
    """Compute the Huber-bounded K2 of each token, (B, T), 0 outside ``mask``.

    (s - t)^2 / 2 up to |s - t| = max_gap and linear beyond, so its slope is the bounded s - t of the advantages. Only
    ``student`` has a gradient.

    Raises:
        ValueError: as ``compute_gaps``.

    Example:
        >>> k2_loss(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -9.0]), torch.tensor([True, True]), max_gap=4.0)
        tensor([ 0.5000, 24.0000])
    """
    mask = mask.bool()
    # If the teacher excludes a token, s - t counts as max_gap.
    floor = student.detach() - max_gap
    near = torch.where(torch.isneginf(teacher), floor, teacher.detach())
    bounded = compute_gaps(student.detach(), near, mask, max_gap=max_gap)
    gap = torch.where(mask, student - near, 0.0)
    return bounded * (gap - bounded / 2)
