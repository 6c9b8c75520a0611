"""Group baselines without rejected siblings.

GRPO, RLOO and OPO compare a row with its siblings. A row that the correction rejects trains nothing, and yet its reward
moves the advantage of those that are left. With ``baseline=exclude`` it does not: it gets a group of its own before
verl's estimator runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

GROUP_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo")
"""verl's ``algorithm.adv_estimator`` whose advantage of a row depends on its own group alone."""


def regroup(groups: Sequence[str], rejected: Tensor) -> tuple[list[str], list[bool]]:
    """Assign groups for the baseline so that a rejected row has no siblings.

    Args:
        groups: the group of each row, such as verl's uid.
        rejected: (B,) bool, rows of which no token is kept.

    Returns:
        The new group of each row; and whether its advantage is 0: a rejected row trains nothing, and the one row
        that is left of a larger group has nothing to be compared with.

    Example:
        >>> import torch
        >>> groups, zeroed = regroup(["a", "a", "b", "b"], torch.tensor([False, False, True, False]))
        >>> groups
        ['a', 'a', 'b/rejected-2', 'b']
        >>> zeroed  # row 3 has lost its only sibling
        [False, False, True, True]
    """
    lost = rejected.tolist()
    size = Counter(groups)
    left = Counter(group for group, gone in zip(groups, lost, strict=True) if not gone)
    rows = list(zip(groups, lost, strict=True))
    regrouped = [f"{group}/rejected-{row}" if gone else group for row, (group, gone) in enumerate(rows)]
    silent = [gone or (left[group] == 1 and size[group] > 1) for group, gone in rows]
    return regrouped, silent
