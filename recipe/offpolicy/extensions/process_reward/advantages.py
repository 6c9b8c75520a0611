"""Utilities of episodes, the per-token advantages computed from utilities, and the names of the columns.

The value of a prefix is V = mean log p(answer | prefix + force prompt), and the utility of episode i is
U_i = V_i - V_{i-1}: the increase of the policy's belief in the answer. Utilities telescope to V_m - V_0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ...proof.rewards import measure_spread

SECTION = "process_reward"
FIELD = "offpolicy_process"
"""Key of a row's extra fields, see ``prefix_scorer.RowValues``."""
UTILITY = "offpolicy_process_utility"
"""float32 per token: the utility of the episode that ends here; NaN elsewhere."""


Normalize = Literal["zscore", "scale", "none"]
LOG_PROBS = 1.0
"""Typical size of log-probs in nats. Utilities are differences of log-probs, so the rounding errors of utilities are on
this scale."""


def utilities(values: Sequence[float] | Tensor) -> Tensor:
    """Compute U_1..U_m, (m,), from V_0..V_m, (m + 1,).

    Raises:
        ValueError: there is no value, or a value is not finite.

    Example:
        >>> utilities([-1.5, -1.0, -2.0])
        tensor([ 0.5000, -1.0000])
    """
    given = torch.as_tensor(values)
    if given.dim() != 1 or len(given) == 0 or not torch.isfinite(given).all():
        raise ValueError(f"values={given.tolist()}: expected V_0 and one finite value for each episode.")
    dtype = given.dtype if given.is_floating_point() else torch.get_default_dtype()
    return given.double().diff().to(dtype)


def token_advantages(
    utilities: Tensor,
    positions: Tensor,
    groups: Sequence[Hashable] | Tensor,
    response_mask: Tensor,
    *,
    normalize: str,
    penalty: Tensor | float = 0.0,
) -> Tensor:
    """Compute all tokens' process advantages, (B, T): normalised utilities, summed from the token to the row's end.

    Args:
        utilities: (B, T) float, read only at ``positions``.
        positions: (B, T) bool, last tokens of episodes; a utility of 0 counts.
        groups: (B,) prompt of each row.
        response_mask: (B, T) bool or 0/1; advantages are 0 outside it.
        normalize: see ``normalize_utilities``.
        penalty: (B, T), the amounts subtracted from normalised utilities.

    Raises:
        ValueError: as ``normalize_utilities``.

    Example:
        Two responses to one prompt, the first with two episodes, the second with one; their utilities have mean 0.1667,
        standard deviation 0.2517 and root mean square 0.2646. ``zscore`` turns the first row's progress into a loss.

        >>> u = torch.tensor([[0.0, 0.2, 0.0, -0.1], [0.0, 0.4, 0.0, 0.0]])
        >>> at, mask = u != 0, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        >>> token_advantages(u, at, ["a", "a"], mask, normalize="zscore")[0]
        tensor([-0.9272, -0.9272, -1.0596, -1.0596])
        >>> token_advantages(u, at, ["a", "a"], mask, normalize="scale")[0]
        tensor([ 0.3780,  0.3780, -0.3780, -0.3780])
    """
    dealt = normalize_utilities(utilities, positions, groups, normalize=normalize) - penalty
    returns = dealt.flip(-1).cumsum(-1).flip(-1)
    return torch.where(response_mask.bool(), returns, 0.0).to(utilities.dtype)


def normalize_utilities(
    utilities: Tensor, positions: Tensor, groups: Sequence[Hashable] | Tensor, *, normalize: str
) -> Tensor:
    """Normalise utilities by the statistics of their group over its n positions, (B, T) float64, 0 elsewhere.

    ``zscore`` subtracts the group's mean and divides by its unbiased standard deviation; the result is at most
    sqrt(n - 1), and 0 if utilities agree within float32 rounding. ``scale`` divides by the root mean square; the result
    is at most sqrt(n), and 0 if all utilities are rounding errors. ``none`` leaves utilities unchanged.

    Raises:
        ValueError: shapes differ, a utility at a position is not finite, or ``normalize`` is unknown.
    """
    names = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if utilities.shape != positions.shape or len(names) != len(utilities):
        raise ValueError(
            f"utilities of {tuple(utilities.shape)}, positions of {tuple(positions.shape)}, {len(names)} groups: "
            f"expected (B, T), (B, T) and B."
        )
    if normalize not in get_args(Normalize):
        raise ValueError(f"normalize={normalize}: not one of {', '.join(get_args(Normalize))}.")
    there = positions.bool()
    if not torch.isfinite(utilities[there]).all():
        row, place = (int(index) for index in (there & ~torch.isfinite(utilities)).nonzero()[0])
        raise ValueError(f"the utility at token {place} of row {row} is not finite.")
    dealt = torch.where(there, utilities.double(), 0.0)  # sums of large values overflow in float32
    if normalize == "none":
        return dealt
    rows_of: dict[Hashable, list[int]] = {}
    for row, name in enumerate(names):
        rows_of.setdefault(name, []).append(row)
    for rows in rows_of.values():
        found = dealt[rows][there[rows]]
        centred = normalize == "zscore"
        factor = measure_spread(found, centred=centred, size=LOG_PROBS).invert()
        centre = found.mean() if centred and len(found) else 0.0
        dealt[rows] = torch.where(there[rows], (dealt[rows] - centre) * factor, 0.0)
    return dealt
