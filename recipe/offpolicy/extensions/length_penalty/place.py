"""Place of a penalty: on rewards before verl's normalisation within the group, or on advantages after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...batch.spread import measure_spread

EPSILON = 1e-6
"""verl's own, beside the standard deviation."""


def compute_shift(penalty: Tensor, scores: Tensor, groups: Mapping[str, Sequence[int]], *, by_std: bool) -> Tensor:
    """Compute what advantages are lowered by after normalisation, (P_i - mean P) / s in each group, (S,) float64.

    s is the standard deviation by which verl has divided the group's rewards, and 1 where these agree within float32
    rounding, so that a coefficient keeps its meaning there. Where penalties differ by more than rewards, 1 / s is
    bounded: no shift exceeds both the group's greatest advantage of verl's, at most sqrt(n - 1) of n rows, and the
    greatest |P_i - mean P|. Means of groups stay as they are.

    Args:
        penalty: (S,) of each session.
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
    """Compute how surely each group's rewards differ, in [0, 1]: 0 where they agree within float32 rounding."""
    return {name: measure_spread(scores[torch.tensor(at)], centred=True).certainty for name, at in groups.items()}
