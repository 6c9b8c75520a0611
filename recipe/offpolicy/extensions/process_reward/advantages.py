"""Utilities of episodes, and advantages by token made of them.

The value of a prefix is V = mean log p(answer | prefix + force prompt), and the utility of episode i is
U_i = V_i - V_{i-1}: what the episode adds to the policy's belief in the answer. Utilities telescope to V_m - V_0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Normalize = Literal["zscore", "scale", "none"]
SMALLEST = 1e-6
"""Nats of standard deviation below which a group has no process advantages."""


def utilities(values: Sequence[float] | Tensor) -> Tensor:
    """Compute U_1..U_m, (m,), from V_0..V_m, (m + 1,).

    Raises:
        ValueError: there is no value, or one is not finite.

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
) -> Tensor:
    """Compute the process advantages of all tokens, (B, T): normalised utilities, summed from a token to the row's end.

    Args:
        utilities: (B, T) float, read at ``positions`` alone.
        positions: (B, T) bool, last tokens of episodes; a utility of 0 counts.
        groups: (B,) prompt of each row.
        response_mask: (B, T) bool or 0/1; advantages are 0 off it.
        normalize: see ``normalize_utilities``.

    Raises:
        ValueError: as ``normalize_utilities``.

    Example:
        One response of two episodes and one of one, of the same prompt: mean 0.1667, std 0.2517. ``zscore`` makes the
        progress of the first row a loss.

        >>> u = torch.tensor([[0.0, 0.2, 0.0, -0.1], [0.0, 0.4, 0.0, 0.0]])
        >>> at, mask = u != 0, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        >>> token_advantages(u, at, ["a", "a"], mask, normalize="zscore")[0]
        tensor([-0.9272, -0.9272, -1.0596, -1.0596])
        >>> token_advantages(u, at, ["a", "a"], mask, normalize="scale")[0]
        tensor([ 0.3974,  0.3974, -0.3974, -0.3974])
    """
    dealt = normalize_utilities(utilities.double(), positions, groups, normalize=normalize)
    returns = dealt.flip(-1).cumsum(-1).flip(-1)
    return torch.where(response_mask.bool(), returns, 0.0).to(utilities.dtype)


def normalize_utilities(
    utilities: Tensor, positions: Tensor, groups: Sequence[Hashable] | Tensor, *, normalize: str
) -> Tensor:
    """Normalise utilities by the statistics of their group over its positions, (B, T), 0 elsewhere.

    ``zscore`` takes the group's mean off and divides by its unbiased standard deviation, ``scale`` divides alone, and
    ``none`` leaves utilities as they are. Groups with fewer than 2 positions or a deviation below ``SMALLEST`` get
    zeros; under ``none`` no group does.

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
    dealt = torch.where(there, utilities, 0.0)
    if normalize == "none":
        return dealt
    rows_of: dict[Hashable, list[int]] = {}
    for row, name in enumerate(names):
        rows_of.setdefault(name, []).append(row)
    for rows in rows_of.values():
        found = dealt[rows][there[rows]]
        spread = found.std() if len(found) > 1 else found.new_zeros(())
        if spread < SMALLEST:
            dealt[rows] = 0.0
        else:
            centre = found.mean() if normalize == "zscore" else 0.0
            dealt[rows] = torch.where(there[rows], (dealt[rows] - centre) / spread, 0.0)
    return dealt
