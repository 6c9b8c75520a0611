"""Place of a penalty: on rewards before verl's normalisation within the group, or on advantages after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""verl's own, beside the standard deviation."""


def compute_shift(penalty: Tensor, scores: Tensor, groups: Mapping[str, Sequence[int]], *, by_std: bool) -> Tensor:
    """Compute what advantages are lowered by after normalisation, (P_i - mean P) / s in each group, (S,) float64.

    s is the standard deviation by which verl has divided the group's rewards, and 1 in a group without one, so that a
    coefficient keeps its meaning where all rewards are equal. Means of groups stay as they are.

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
        spread = float(scores[at].std()) if by_std and len(members) > 1 else 0.0
        shift[at] = centred / (spread + EPSILON if spread > 0 else 1.0)
    return shift


def find_equal_groups(scores: Tensor, groups: Mapping[str, Sequence[int]]) -> set[str]:
    """Find the groups whose rewards are all equal."""
    return {name for name, members in groups.items() if len(set(scores[torch.tensor(members)].tolist())) == 1}
