"""Units, which are the tokens of a row that share one weight or decision, and the tokens to which a part applies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .row_layout import RowLayout, detect_layout

When = Literal["any", "negative", "positive", "post_tool"]
Sign = Literal["row", "token"]
MaskWhen = Literal["any", "negative", "positive", "outward", "post_tool"]
"""Tokens to which a mask applies; ``outward``: tokens whose update moves the two policies further apart (A log r >
0)."""


class Specification:
    """Base class of specifications; computes all cached properties at construction, because compiled code cannot."""

    def __post_init__(self) -> None:
        for cls in type(self).__mro__:
            for name, value in vars(cls).items():
                if isinstance(value, cached_property):
                    getattr(self, name)


class Part(Specification):
    """Common base of weights and masks: the ratio and the tokens on which they decide."""

    ratio: str
    when: MaskWhen
    sign: Sign

    @cached_property
    def needs_step(self) -> bool:
        """True if the decision needs the current policy or the advantages."""
        return self.ratio != "rollout" or self.when != "any"

    @cached_property
    def picks_tokens(self) -> bool:
        """True if the part can apply to only some of a unit's tokens; a mask's reported shares then count tokens."""
        return self.when in ("outward", "post_tool") or (self.when != "any" and self.sign == "token")


Level = Literal["token", "sequence", "turn", "version", "prefix"]


@dataclass(frozen=True)
class Units:
    """A partition of each row's tokens; at level ``prefix``, a unit is a token with all valid tokens before it.

    For level ``sequence``, the values of the units are a column (see ``RowLayout``). For other levels, they have one
    slot per token, because a row of T tokens has at most T units, and counting them on the host would synchronise with
    the device. Units without a valid token sum to 0.

    Attributes:
        valid: (B, T) bool, or (N,) packed: the tokens that belong to a unit.
        index: int64 in the same shape, position (along the last dimension) at which the value of each token's unit is
            stored; None for levels ``token`` and ``sequence``.
        level: kind of unit.
        rows: layout of the tokens.
        ages: float64 in the shape of ``valid``, number of weight versions since each token was sampled; None: unknown.
    """

    valid: Tensor
    index: Tensor | None
    level: Level
    rows: RowLayout
    ages: Tensor | None = None
    _known: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def total(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each unit in float64; per-token ``values`` are 0 outside ``valid``."""
        if self.level == "token":
            return values.double()
        if self.level == "prefix":
            return self.rows.cumulative_sum(values)
        if self.index is None:
            return self.rows.sum(values)
        sums = torch.zeros_like(self.valid, dtype=torch.float64)
        return sums.scatter_add_(-1, self.index, values.double())

    def mean(self, values: Tensor) -> Tensor:
        """Average over each unit's tokens in float64, 0 if there are none; ``values`` must be 0 outside ``valid``."""
        if self.level == "token":
            return values.double()
        return self.total(values) / self.tokens.clamp(min=1)

    def greatest(self, values: Tensor) -> Tensor:
        """Compute the greatest value of each unit in float64, -inf without a token; ``values`` are per token."""
        chosen = torch.where(self.valid, values.double(), -math.inf)
        if self.level == "token":
            return chosen
        if self.level == "prefix":
            return self.rows.cumulative_max(chosen)
        if self.index is None:
            return self.rows.max(chosen)
        least = torch.full_like(self.valid, -math.inf, dtype=torch.float64)
        return least.scatter_reduce_(-1, self.index, chosen, "amax")

    def spread(self, values: Tensor) -> Tensor:
        """Return the value of each token's unit, per token; meaningless outside ``valid``."""
        if self.level in ("token", "prefix"):
            return values
        if self.index is None:
            return self.rows.broadcast(values).expand(self.valid.shape)
        return values.gather(-1, self.index)

    def least_before(self, values: Tensor) -> Tensor:
        """Compute for each token the minimum of 0 and the values of all valid tokens before it in its row; float64."""
        below = torch.where(self.valid, values.double(), 0.0).clamp(max=0)
        return -self.rows.previous(self.rows.cumulative_max(-below), 0.0)

    @property
    def exists(self) -> Tensor:
        """Bool flags of the units with a valid token; at level ``prefix``, of the units whose last token is valid."""
        return self.valid if self.level in ("token", "prefix") else self.tokens > 0

    @property
    def sharing(self) -> Tensor:
        """Number of valid tokens to which the unit's value applies, float64: the unit's tokens, or 1 for a prefix."""
        return self.valid.double() if self.level == "prefix" else self.tokens

    @property
    def tokens(self) -> Tensor:
        """Number of valid tokens of each unit, float64."""
        # This is not a cached property, because a cached property's lock cannot be compiled.
        if "tokens" not in self._known:
            self._known["tokens"] = self.total(self.valid)
        return self._known["tokens"]

    @property
    def oldest(self) -> Tensor:
        """Age of the oldest token of each unit in float64; -inf for a unit without a token.

        Raises:
            ValueError: ages are not known.
        """
        if self.ages is None:
            raise ValueError("the age of the weights is needed but unknown. Pass staleness, (B,) or (B, T).")
        if "oldest" not in self._known:
            self._known["oldest"] = self.greatest(self.ages)
        return self._known["oldest"]

    def scale_limit(self, limit: float, factors: Sequence[float] | None, power: float | None) -> Tensor | float:
        """Multiply a log bound by each unit's factor for its age, or by its token count to the power ``power``.

        Returns:
            One float32 per unit, because comparisons are in float32; the limit itself if it is infinite or not scaled.
        """
        if abs(limit) == math.inf:
            return limit
        if factors is not None:
            return self.choose_by_age([limit * factor for factor in factors], torch.float32)
        return limit if power is None else (limit * self.scale_by_position(power)).float()

    def scale_by_position(self, power: float) -> Tensor:
        """Raise the number of tokens of each unit to the power ``power``, in float64; 1 for a unit without a token."""
        # 0 to a negative power is infinite, and infinity times the log of a bound of 1 is NaN.
        return self.tokens.clamp(min=1).pow(power)

    def choose_by_age(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Choose one of ``values`` per unit by age (0, 1, ... versions); the last value also applies to older units."""
        table = torch.tensor(values, dtype=dtype, device=self.valid.device)
        return table[self.oldest.clamp(0, len(values) - 1).long()]


def partition_units(
    level: Level, valid: Tensor, ids: Tensor | None, rows: RowLayout | None = None, ages: Tensor | None = None
) -> Units:
    """Partition the tokens of each row into the units of one level.

    Args:
        valid: (B, T) bool, or (N,) packed.
        ids: integers in the shape of ``valid``, for ``turn`` and ``version``: tokens of a row with the same id form a
            unit.
        rows: layout of the tokens; None: padded.
        ages: in the shape of ``valid``, for parts that depend on age.

    Example:
        >>> partition_units("sequence", torch.tensor([[True, True, False]]), None).tokens.tolist()
        [[2.0]]
    """
    rows = detect_layout(valid=valid) if rows is None else rows
    index = _places(ids, valid, rows) if level in ("turn", "version") and ids is not None else None
    return Units(valid, index, level, rows, ages)


def turns(response_mask: Tensor) -> Tensor:
    """Number each row's turns from 0, (B, T) int64: tool outputs, which the response mask excludes, separate the turns.

    Args:
        response_mask: (B, T) bool or 0/1, or nested by row; the turns are then nested too.

    Example:
        >>> turns(torch.tensor([[1, 1, 0, 1, 0]])).tolist()  # a tool token belongs to the turn before it
        [[0, 0, 0, 1, 1]]
    """
    rows = detect_layout(response_mask=response_mask)
    mask = rows.tokens(response_mask).bool()
    starts = mask & ~rows.equals_previous(mask)
    return rows.to_given_layout((rows.cumulative_count(starts) - 1).clamp(min=0))


def _places(ids: Tensor, valid: Tensor, rows: RowLayout) -> Tensor:
    """Find the position of each token's unit. The units of a row are stored from its first position, ordered by id."""
    # A token starts a unit if its id differs from the previous id once the row is sorted by id. Tokens that are not
    # valid join the unit of id 0, to which they add nothing, so their ids do not matter.
    ordered, order = rows.sort(ids * valid)
    number = rows.cumulative_count(~rows.equals_previous(ordered)) - 1
    return rows.to_position(torch.empty_like(number).scatter_(-1, order, number))


def find_applicable(
    part: Part,
    advantages: Tensor | None,
    valid: Tensor,
    rows: RowLayout | None = None,
    *,
    log_ratio: Tensor | None = None,
    turns: Tensor | None = None,
) -> Tensor:
    """Flag the tokens to which a mask or weight applies, by the sign of the token or row-mean advantage, or by turn.

    Args:
        advantages, valid: (B, T), or (N,) packed; advantages may be None for ``post_tool``.
        rows: layout of these tensors; None: padded.
        log_ratio: log r of the mask's ratio, in their shape, 0 outside ``valid``; read only for ``when=outward``.
        turns: integers in their shape, from 0 in each row; read only for ``when=post_tool``.

    Returns:
        A bool tensor that broadcasts against ``advantages``: (B, 1) if padded and equal for a whole row.

    Example:
        >>> from .masks import MaskSpec
        >>> mask = MaskSpec("full", "token", "product", 0.5, 2.0, "negative")
        >>> advantages, valid = torch.tensor([[-3.0, 1.0], [1.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool)
        >>> find_applicable(mask, advantages, valid).tolist()  # row means -1 and 1
        [[True], [False]]
    """
    if part.when == "any":
        return torch.ones_like(valid[..., :1])
    if part.when == "post_tool":
        if turns is None:
            raise ValueError(
                "when=post_tool needs segment_ids to find the turn boundaries. Pass segment_ids as (B, T) integers."
            )
        return turns > 0
    assert advantages is not None, "a part that selects tokens by the sign of their advantages needs advantages"
    value = torch.where(valid, advantages.detach(), 0.0)
    if part.sign == "row":
        rows = detect_layout(valid=valid) if rows is None else rows
        value = rows.broadcast(rows.sum(value))
    if part.when == "outward":
        assert log_ratio is not None, "when=outward needs the log-ratio of the mask"
        return value * log_ratio.sign() > 0
    return value < 0 if part.when == "negative" else value > 0
