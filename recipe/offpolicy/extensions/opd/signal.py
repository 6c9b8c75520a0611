"""Teacher signals, K1 as an advantage and K2 as a loss: eligible rollouts, formulas, and columns for the workers.

With s and t the log-probs of student and teacher for the same sampled token, K1 = s - t estimates the reverse KL and
K2 = (s - t)^2 / 2 has its gradient, (s - t) grad s (Schulman 2020, Approximating KL divergence). The gradient of K1
does not depend on the teacher, so K1 is used as an advantage and never as a loss.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from ...proof.rewards import check_rewards, measure_spread


def find_passed(rewards: Tensor, passed_above: float) -> Tensor:
    """Find the rewards above a threshold, bool; compared in float32, so that a reward of 0.3 is not above 0.3.

    Example:
        >>> find_passed(torch.tensor([0.3, 0.5]).double(), 0.3)
        tensor([False,  True])
    """
    return rewards.float() > torch.tensor(passed_above, dtype=torch.float32)


def compute_pass_rates(rewards: Tensor, groups: Sequence[Hashable] | Tensor, *, passed_above: float) -> Tensor:
    """Compute for each rollout the share of its group that passes, (B,) float64.

    Args:
        rewards: (B,) float, one per rollout; a reward exactly at ``passed_above`` does not pass.
        groups: (B,) prompt of each rollout.

    Raises:
        ValueError: a reward is not finite, or the number of groups differs.
    """
    names = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if rewards.dim() != 1 or len(names) != len(rewards):
        raise ValueError(f"{tuple(rewards.shape)} rewards for {len(names)} groups: expected one of each per rollout.")
    check_rewards(rewards, names)
    if not math.isfinite(passed_above):
        raise ValueError(f"passed_above={passed_above}: not a finite number.")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    group = torch.tensor([numbers[name] for name in names], dtype=torch.int64, device=rewards.device)
    count = torch.zeros(len(numbers), dtype=torch.float64, device=rewards.device)
    passed = count.index_add(0, group, find_passed(rewards, passed_above).double())
    return (passed / count.index_add(0, group, torch.ones_like(group, dtype=torch.float64)))[group]


def eligible(
    rewards: Tensor,
    groups: Sequence[Hashable] | Tensor,
    *,
    passed_above: float,
    max_pass_rate: float,
    rows: str = "failed",
) -> Tensor:
    """Find the rollouts to distil, (B,) bool: rollouts of prompts whose pass rate is at most ``max_pass_rate``.

    Args:
        rewards, groups, passed_above: see ``compute_pass_rates``.
        max_pass_rate: in [0, 1], inclusive.
        rows: the ``failed`` rollouts of such prompts, or ``all`` rollouts of them.

    Raises:
        ValueError: as in ``compute_pass_rates``, or a setting is out of its range.

    Example:
        >>> eligible(torch.tensor([0.0, 0.0, 1.0, 1.0]), ["a", "a", "a", "b"], passed_above=0.0, max_pass_rate=0.5)
        tensor([ True,  True, False, False])
    """
    if not 0 <= max_pass_rate <= 1:
        raise ValueError(f"max_pass_rate={max_pass_rate}: not in [0, 1].")
    if rows not in ("failed", "all"):
        raise ValueError(f"rows={rows}: not one of failed, all.")
    hard = compute_pass_rates(rewards, groups, passed_above=passed_above) <= max_pass_rate
    return hard if rows == "all" else hard & ~find_passed(rewards, passed_above)


LOG_PROBS = 1.0
"""Typical size of log-probs in nats, the scale of the gaps' rounding errors, because gaps are their differences."""


def find_horizon(tokens: Tensor, horizon: int | None) -> Tensor:
    """Find the first ``horizon`` tokens of each row of ``tokens``, (B, T) bool; with None, all of the tokens.

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
    """Compute the factor of a scheduled coefficient: 1 up to ``start``, ``final`` from ``end``, linear in between.

    Example:
        >>> [compute_factor(gap, start=2.0, end=1.0, final=0.5) for gap in (3.0, 1.5, 0.2)]
        [1.0, 0.75, 0.5]
    """
    return 1 + (final - 1) * min(max((value - start) / (end - start), 0.0), 1.0)


def compute_centre(gaps: Tensor, tokens: Tensor, scale: str | float) -> float:
    """Compute the value subtracted from the gaps before scaling: the gaps' mean with ``mean_std``, otherwise 0."""
    chosen = gaps[tokens].double()
    return float(chosen.mean()) if scale == "mean_std" and len(chosen) else 0.0


def compute_scale(gaps: Tensor, tokens: Tensor, scale: str | float) -> float:
    """Compute the divisor of the signal over a whole batch: the spread of ``gaps``, 1.0, or a number.

    ``mean_std`` is the standard deviation about the mean that ``compute_centre`` returns.
    ``std`` is the deviation about 0, because nothing is centred: if a teacher considers all tokens less likely than the
    student does, this is part of the signal. Over n tokens, no gap exceeds sqrt(n) times ``std``. The divisor is 1.0 if
    all gaps are float32 rounding errors.

    Raises:
        ValueError: the scale is neither std, mean_std, none nor a finite number above 0.
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
    """Replace the advantages of eligible tokens with -coef (gap - centre) / scale, (B, T), where gap = s - t.

    Args:
        base: (B, T) advantages of the estimator, bitwise unchanged elsewhere.
        student, teacher: (B, T) log-probs of the sampled tokens; read only at eligible tokens within the horizon.
        eligible_tokens: (B, T) bool.
        coef: factor of the signal.
        max_gap: bound of |s - t|, in nats.
        scale: ``std``, the root mean square of the bounded gaps over the whole batch, ``mean_std``, ``none``, or a
            number; see ``compute_scale``.
        horizon: number of tokens of a row that take part, counted from its first eligible token; later tokens receive 0
            and are not included in any statistic.
        centre: value subtracted from the gaps; None: the value of ``compute_centre``.

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

    The loss is (s - t)^2 / 2 up to |s - t| = max_gap and linear beyond, so its slope is the bounded s - t of the
    advantages. Only ``student`` has a gradient.

    Raises:
        ValueError: as in ``compute_gaps``.

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


TEACHER = "offpolicy_opd_teacher"
"""float32 per token: the teacher's log-prob; NaN where it was not requested."""
ROW = "offpolicy_opd_row"
"""int8 per row: 1 for an eligible rollout."""
FACTOR = "offpolicy_opd_factor"
"""float32 per row: the schedule's factor / the divisor of the advantages, the same for the whole batch."""
CENTRE = "offpolicy_opd_centre"
"""float32 per row: the value subtracted from the gaps, the same for the whole batch."""
SENT = (TEACHER, ROW, FACTOR, CENTRE)
"""All columns, which the loss needs."""


def describe_missing(arrived: Iterable[str]) -> str:
    """Explain that teacher log-probs did not reach the loss, and list the columns that did."""
    return (
        f"opd: {TEACHER} did not reach the loss (columns that did: {', '.join(arrived) or 'none'}). Some code selects "
        "the columns that go to the workers, and omits opd's columns."
    )


def find_scored(teacher: Tensor, row: Tensor, response_mask: Tensor) -> Tensor:
    """Find the tokens that the teacher scored, (B, T) bool."""
    return row.bool()[:, None] & response_mask.bool() & ~torch.isnan(teacher)
