"""Position of a penalty: on rewards before verl's normalisation within the group, or on advantages after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...batch.spread import measure_spread

EPSILON = 1e-6
"""verl's constant, added to the standard deviation."""


def compute_shift(penalty: Tensor, scores: Tensor, groups: Mapping[str, Sequence[int]], *, by_std: bool) -> Tensor:
    """Compute the decrease of advantages after normalisation, (P_i - mean P) / s in each group, (S,) float64.

    s is the standard deviation by which verl has divided the group's rewards, and 1 if these agree within float32
    rounding, so that a coefficient keeps its meaning there. If penalties differ by more than rewards, 1 / s is bounded:
    no shift exceeds both the group's largest advantage in verl, at most sqrt(n - 1) for n rows, and the largest
    |P_i - mean P|. Means of groups are unchanged.

    Args:
        penalty: (S,) penalty of each session.
        scores: (S,) raw rewards.
        groups: sessions of each group; others are not shifted.
        by_std: verl divides by the standard deviation.
    """
    shift = torch.zeros_like(penalty)
    for members in groups.values():
        at = torch.tensor(members)
        centred = penalty[at] - penalty[at].mean()
        shift[at] = centred * (_compute_factor(scores[at], float(centred.abs().max())) if by_std else 1.0)
    return shift


def _compute_factor(scores: Tensor, largest: float) -> float:
    """Compute the 1 / s of one group whose penalties are at most ``largest`` from their mean."""
    scores = scores.double()
    spread = measure_spread(scores, centred=True)
    verls = 1 / (spread.value + EPSILON)
    own = spread.certainty * verls * float((scores - scores.mean()).abs().max())
    bound = max(1.0, own / largest) if largest > 0 else 1.0
    return spread.certainty * min(verls, bound) + (1 - spread.certainty)


def compare_rewards(scores: Tensor, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Compute how certainly each group's rewards differ, in [0, 1]: 0 if they agree within float32 rounding."""
    return {name: measure_spread(scores[torch.tensor(at)], centred=True).certainty for name, at in groups.items()}
