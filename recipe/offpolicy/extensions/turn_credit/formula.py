"""Advantages per turn for a group's rollouts, from rewards per turn and per rollout, normalised within the group.

``turn_index`` compares a turn's discounted return with the returns of the siblings' turns with the same number.
``return_to_go`` normalises turn rewards over all turns of the group and rollout rewards over its rollouts, and then
sums them to the end of the rollout (process supervision in GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1.3, with a
turn as the step).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ...batch.safe_values import ROUNDING, SMALLEST, measure_spread

Normalize = Literal["turn_index", "return_to_go"]
ERROR = 1e-7
"""Accepted error of an advantage in float64, relative to the largest number from which it is computed."""


def compute_advantages(
    counts: Tensor,
    rewards: Tensor,
    scores: Tensor | None,
    *,
    normalize: Normalize,
    coef: float = 1.0,
    gamma: float = 1.0,
    by_std: bool = True,
) -> Tensor:
    """Compute the advantage of each turn of one group, (R, K) float64, 0 after a rollout's last turn.

    Args:
        counts: (R,) int64, number of turns in each rollout, at most K.
        rewards: (R, K) float64, rewards of turns; NaN where a turn has none.
        scores: (R,) float64, reward of each rollout, which its last turn earns; None: not used.
        coef: factor of ``rewards``.
        gamma: discount per turn.
        by_std: divide by the standard deviation in addition to subtracting the mean.

    Example:
        >>> turns = torch.tensor([[1.0, math.nan], [0.0, math.nan]]).double()
        >>> ends = torch.tensor([0.0, 2.0]).double()
        >>> compute_advantages(torch.tensor([2, 2]), turns, ends, normalize="turn_index", by_std=False).tolist()
        [[-0.5, -1.0], [0.5, 1.0]]
    """
    place = torch.arange(rewards.shape[1])
    there, last = place < counts[:, None], place == counts[:, None] - 1
    paid = there & ~torch.isnan(rewards)
    whole = torch.zeros(len(counts), dtype=torch.float64) if scores is None else scores
    if normalize == "turn_index":
        returns = _discount(torch.where(paid, coef * rewards, 0.0) + last * whole[:, None], gamma)
        dealt = torch.zeros_like(returns)
        for k in range(rewards.shape[1]):
            dealt[there[:, k], k] = _standardise(returns[there[:, k], k], by_std)
        return dealt
    credit = torch.zeros_like(rewards)
    credit[paid] = coef * _standardise(rewards[paid], by_std)
    credit[last] += _standardise(whole[counts > 0], by_std)
    return torch.where(there, _discount(credit, gamma), 0.0)


def _discount(values: Tensor, gamma: float) -> Tensor:
    """Sum each (R, K) value with the discounted later values in its row."""
    summed = values.clone()
    for k in range(values.shape[1] - 2, -1, -1):
        summed[:, k] += gamma * summed[:, k + 1]
    return summed


def _standardise(values: Tensor, by_std: bool) -> Tensor:
    """Subtract the mean, and divide by the standard deviation; 0 for a value without siblings, or for equal values."""
    if len(values) < 2:
        return torch.zeros_like(values)
    above = values - values[0]
    centred = above - above.mean()
    return centred * measure_spread(values, centred=True).invert() if by_std else centred


def find_difference(
    seen: Sequence[Sequence[float]],
    rewards: Sequence[Sequence[float]],
    scores: Sequence[float] | None,
    *,
    normalize: Normalize,
    coef: float,
    gamma: float,
    by_std: bool,
) -> str | None:
    """Compare one group's advantages with a second implementation in plain Python; None if they agree.

    Args:
        seen: for each rollout, the advantages of its turns.
        rewards: the same shape; NaN where a turn has no reward.
    """
    ends = [0.0] * len(seen) if scores is None else scores

    def state(values: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
        count, middle = len(values), math.fsum(values.values()) / max(len(values), 1)
        if count < 2:
            return dict.fromkeys(values, 0.0)
        apart = {at: value - middle for at, value in values.items()}
        if not by_std:
            return apart
        spread = math.sqrt(math.fsum(each * each for each in apart.values()) / (count - 1))
        least = ROUNDING * max(SMALLEST, *map(abs, values.values()))
        certain = min(1.0, max(0.0, spread / least - 1))
        return {at: certain * each / spread if certain else 0.0 for at, each in apart.items()}

    turns = [(i, k) for i, row in enumerate(seen) for k in range(len(row))]
    paid = {(i, k): rewards[i][k] for i, k in turns if not math.isnan(rewards[i][k])}
    final = {(i, len(row) - 1): ends[i] for i, row in enumerate(seen) if row}
    by_pool = normalize == "return_to_go"
    own, whole = (state(paid), state(final)) if by_pool else (paid, final)

    def sum_later(i: int, k: int) -> float:
        later = range(k, len(seen[i]))
        return math.fsum(gamma ** (at - k) * (coef * own.get((i, at), 0.0) + whole.get((i, at), 0.0)) for at in later)

    wanted = {at: sum_later(*at) for at in turns}
    if not by_pool:
        columns = [{at: wanted[at] for at in turns if at[1] == k} for k in range(max(map(len, seen), default=0))]
        wanted = {at: value for column in columns for at, value in state(column).items()}
    size = max([1.0, *map(abs, wanted.values()), *(abs(coef * each) for each in paid.values()), *map(abs, ends)])
    for i, k in turns:
        if not abs(seen[i][k] - wanted[i, k]) <= ERROR * size:
            where = f"turn {k} of rollout {i} of {len(seen)}"
            return f"{where} has the advantage {seen[i][k]:.6g}, but {normalize} requires {wanted[i, k]:.6g}"
    return None
