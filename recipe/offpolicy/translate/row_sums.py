"""Sums per row of a batch, from which all of verl's metrics and decisions are computed, and their torch backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..correction.ratios import (
    clamp_and_exp,
    compute_divergence,
    compute_excess,
    compute_log_ratio,
    find_valid_tokens,
    promote_weight_dtype,
)
from ..correction.row_layout import RowLayout

Kind = Literal["raw", "capped", "banded", "k1", "k2", "k3"]
"""A token's weight w before its bounds; min(w, upper); w, or 0 outside bounds; and k1, k2, k3 of log pi_old / mu."""

Numbers = NDArray[np.float64]
Truths = NDArray[np.bool_]

COLUMNS = ("response", "tokens", "old", "rollout", "log_ratio", "k2", "k3", "chi2", "k2_max", "k3_max")
MEASURES = ("total", "square", "deviation", "squared_deviation", "least", "greatest", "above", "below")


@dataclass(frozen=True)
class Quantity:
    """A per-token statistic and its bounds.

    Attributes:
        lower, upper: inclusive bounds, in nats, compared in float32: they apply to log pi_old / mu for weights, and
            otherwise to k1, k2 or k3 itself; infinite if open.
        bounds: bounds of the weight itself, for ``capped`` and ``banded``.
    """

    kind: Kind
    lower: float
    upper: float
    bounds: tuple[float, float] = (0.0, 0.0)

    @property
    def is_weight(self) -> bool:
        return self.kind in ("raw", "capped", "banded")

    @property
    def about(self) -> float:
        """Reference value near the mean; deviations from it are summed instead of values, to avoid cancellation."""
        return 1.0 if self.is_weight else 0.0

    @property
    def clamp(self) -> tuple[float, float]:
        """Bounds to which a value is clamped before its deviation is summed; infinite for weights."""
        if self.is_weight:
            return -float("inf"), float("inf")
        return self.lower if self.kind == "k1" else 0.0, self.upper


@dataclass(frozen=True)
class RowSums:
    """Sums over the valid tokens of each row, (B,) float64 each.

    Attributes:
        response: number of tokens in the response mask, whether they are valid or not.
        tokens: T, number of valid tokens.
        old, rollout, log_ratio: sums of log pi_old, log mu and their difference.
        k2, k3: sums of k2 and k3.
        chi2: sum of rho^2 - 1.
        k2_max, k3_max: largest k2 and k3, 0 without tokens.
    """

    response: Numbers
    tokens: Numbers
    old: Numbers
    rollout: Numbers
    log_ratio: Numbers
    k2: Numbers
    k3: Numbers
    chi2: Numbers
    k2_max: Numbers
    k3_max: Numbers

    @classmethod
    def from_table(cls, table: Numbers) -> RowSums:
        """Build from (10, B), in the order of ``COLUMNS``."""
        return cls(*table)

    def select_rows(self, rows: Truths | slice) -> RowSums:
        """Return the sums of some of the rows."""
        return RowSums(*(getattr(self, name)[rows] for name in COLUMNS))


@dataclass(frozen=True)
class QuantitySums:
    """Per-row sums of m quantities v, each per token or with one value per row.

    Attributes:
        of_tokens: (m,), whether the shares outside the bounds are shares of tokens instead of rows.
        about: (m,) an estimate of the mean, from which deviations are computed.
        table: (8, m, B) float64, in the order of ``MEASURES``: sums of v and v^2 over the row's tokens; sums of
            c - about and its square, with c = v clamped to its bounds; extremes of v, undefined for a row without
            tokens; number of tokens beyond the upper and the lower bound.
    """

    of_tokens: Truths
    about: Numbers
    table: Numbers

    @classmethod
    def from_token_table(cls, quantities: Sequence[Quantity], table: Numbers) -> QuantitySums:
        """Build from (8, m, B), in the order of ``MEASURES``, for per-token quantities."""
        about = np.array([quantity.about for quantity in quantities], dtype=np.float64)
        return cls(np.ones(len(quantities), dtype=np.bool_), about, table)

    def __getitem__(self, measure: str) -> Numbers:
        """Return one of ``MEASURES``, (m, B)."""
        return self.table[MEASURES.index(measure)]

    def select_quantities(self, part: slice | Sequence[int]) -> QuantitySums:
        """Return some of the quantities."""
        return QuantitySums(self.of_tokens[part], self.about[part], self.table[:, part])

    def select_rows(self, rows: Truths | slice) -> QuantitySums:
        """Return the sums of some of the rows."""
        return QuantitySums(self.of_tokens, self.about, self.table[:, :, rows])

    def concatenate(self, other: QuantitySums) -> QuantitySums:
        """Return the quantities of both objects, starting with those of this object."""
        return QuantitySums(
            np.concatenate([self.of_tokens, other.of_tokens]),
            np.concatenate([self.about, other.about]),
            np.concatenate([self.table, other.table], axis=1),
        )


def compare_with_bounds(values: Numbers, lower: Numbers, upper: Numbers) -> tuple[Truths, Truths]:
    """Compare values with inclusive bounds, in float32 like the masks.

    Args:
        values: (m, B).
        lower, upper: (m,).

    Returns:
        (m, B) bool each: above and below.
    """
    single = values.astype(np.float32)
    return single > upper.astype(np.float32)[:, None], single < lower.astype(np.float32)[:, None]


def measure_rows(
    values: Numbers, tokens: Numbers, outside: tuple[Truths, Truths], *, clamp: tuple[Numbers, Numbers], about: float
) -> QuantitySums:
    """Build the sums of m quantities with one value per row.

    Args:
        values: (m, B).
        tokens: (B,).
        outside: (m, B) above and below the bounds.
        clamp: (m,) bounds of c, infinite if open.
    """
    above, below = outside
    deviation = np.clip(values, clamp[0][:, None], clamp[1][:, None]) - about
    weighted = [tokens * each for each in (values, np.square(values), deviation, np.square(deviation))]
    return QuantitySums(
        np.zeros(len(values), dtype=np.bool_),
        np.full(len(values), about),
        np.stack([*weighted, values, values, tokens * above, tokens * below]),
    )


class Batch(Protocol):
    """Log-probs and mask of a batch, accessed through a backend that suits their device."""

    @property
    def device(self) -> torch.device: ...

    def sweep(self, quantities: Sequence[Quantity]) -> tuple[RowSums, QuantitySums]:
        """Read the batch once, and return the row sums and the sums of the per-token quantities."""

    def compute_token_weights(self, quantity: Quantity, factor: float) -> Tensor:
        """Compute weights of kind ``capped`` or ``banded``, divided by ``factor``, in float32 or wider.

        Weights have the batch's layout, and are 0 outside valid tokens.
        """

    def spread_row_weights(self, rows: Numbers) -> Tensor:
        """Spread the weights of the rows, (B,), over their valid tokens, in the form of ``compute_token_weights``."""

    def apply_rejections(self, rows: Truths, quantities: Sequence[Quantity]) -> tuple[Tensor, Numbers]:
        """Drop rejected ``rows``, (B,), and tokens outside the bounds of a quantity from the mask.

        Returns:
            The mask, in its own dtype, and the number of valid tokens that each row lost, (B,).
        """


class TorchBatch:
    """Backend of ``row_sums.Batch`` with torch operations.

    Args:
        rows: layout of the tensors.
        old_log_prob, rollout_log_prob: any float dtype.
        response_mask: bool, integer or float 0/1.
    """

    def __init__(self, rows: RowLayout, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> None:
        old, rollout, mask = (rows.tokens(tensor) for tensor in (old_log_prob, rollout_log_prob, response_mask))
        self.device = old.device
        self._rows = rows
        self._log_probs = old, rollout
        self._mask = mask
        self._valid = find_valid_tokens(mask, old, rollout)
        self._log_rho = compute_log_ratio(old, rollout, self._valid)
        self._dtype = promote_weight_dtype(old, rollout)

    def sweep(self, quantities: Sequence[Quantity]) -> tuple[RowSums, QuantitySums]:
        rows, valid = self._rows, self._valid
        above, k2, k3 = (
            compute_excess(self._log_rho),
            compute_divergence("k2", self._log_rho),
            compute_divergence("k3", self._log_rho),
        )
        sums = [
            self._mask.bool().double(),
            valid.double(),
            *(torch.where(valid, each.detach().double(), 0.0) for each in self._log_probs),
            self._log_rho,
            k2,
            k3,
            above * (above + 2),
        ]
        columns = [rows.sum(each) for each in sums] + [rows.max(each).clamp(min=0) for each in (k2, k3)]
        measures = [column for quantity in quantities for column in self._measure(quantity)]
        # This is the only transfer from the device.
        table = torch.stack([column.flatten() for column in (*columns, *measures)]).cpu().numpy()
        of_quantities = table[len(COLUMNS) :].reshape(len(quantities), len(MEASURES), rows.count).swapaxes(0, 1)
        return RowSums.from_table(table[: len(COLUMNS)]), QuantitySums.from_token_table(quantities, of_quantities)

    def compute_token_weights(self, quantity: Quantity, factor: float) -> Tensor:
        return self._rows.to_given_layout(
            torch.where(self._valid, self._values(quantity) / factor, 0.0).to(self._dtype)
        )

    def spread_row_weights(self, rows: Numbers) -> Tensor:
        return self._rows.to_given_layout(torch.where(self._valid, self._by_token(rows), 0.0).to(self._dtype))

    def apply_rejections(self, rows: Truths, quantities: Sequence[Quantity]) -> tuple[Tensor, Numbers]:
        keep = self._valid & ~self._by_token(rows)
        for quantity in quantities:
            above, below = self._outside(quantity)
            keep &= ~(above | below)
        mask = torch.where(keep, self._mask, torch.zeros_like(self._mask))
        return self._rows.to_given_layout(mask), self._rows.sum(self._valid & ~keep).flatten().cpu().numpy()

    def _by_token(self, rows: Numbers | Truths) -> Tensor:
        """Spread one value per row over the row's tokens."""
        return self._rows.broadcast(self._rows.to_column(torch.from_numpy(rows).to(self.device)))

    def _measure(self, quantity: Quantity) -> list[Tensor]:
        rows, values, valid = self._rows, self._values(quantity), self._valid
        deviation = torch.where(valid, values.clamp(*quantity.clamp) - quantity.about, 0.0)
        counted = torch.where(valid, values, 0.0)
        above, below = self._outside(quantity)
        return [
            *(rows.sum(each) for each in (counted, counted.square(), deviation, deviation.square())),
            -rows.max(torch.where(valid, -values, -math.inf)),  # ``min`` supports only integers
            rows.max(torch.where(valid, values, -math.inf)),
            *(rows.sum((valid & outside).double()) for outside in (above, below)),
        ]

    def _values(self, quantity: Quantity) -> Tensor:
        if not quantity.is_weight:
            return compute_divergence(quantity.kind, self._log_rho)
        raw = clamp_and_exp(self._log_rho)
        if quantity.kind == "capped":
            return raw.clamp(max=quantity.bounds[1])
        if quantity.kind == "banded":
            above, below = self._outside(quantity)
            return torch.where(above | below, 0.0, raw)
        return raw

    def _outside(self, quantity: Quantity) -> tuple[Tensor, Tensor]:
        """Compare with the inclusive bounds, in float32 like the masks: (above, below)."""
        value = self._log_rho if quantity.is_weight else compute_divergence(quantity.kind, self._log_rho)
        value = value.to(torch.float32)
        return value > quantity.upper, value < quantity.lower
