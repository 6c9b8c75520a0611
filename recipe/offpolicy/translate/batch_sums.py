"""Sums per row of a batch, from which all of verl's metrics and decisions are computed.

Two backends read a batch: ``CompiledBatch`` on the CPU, in compiled loops, and ``TorchBatch`` on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..correction.ratios import (
    EXP_CLAMP,
    clamp_and_exp,
    compute_divergence,
    compute_excess,
    compute_log_ratio,
    find_valid_tokens,
    promote_weight_dtype,
)
from ..correction.row_layout import PackedRows, RowLayout

Kind = Literal["raw", "capped", "banded", "k1", "k2", "k3"]
"""Per-token statistics: the weight w before its bounds; min(w, upper); w, or 0 outside the bounds; and k1, k2, k3 of
log pi_old / mu. The loops number the kinds in this order."""

Numbers = NDArray[np.float64]
Truths = NDArray[np.bool_]

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
            return -math.inf, math.inf
        return self.lower if self.kind == "k1" else 0.0, self.upper


class RowSums(NamedTuple):
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

    def select_rows(self, rows: Truths | slice) -> RowSums:
        """Return the sums of some of the rows."""
        return RowSums(*(column[rows] for column in self))


@dataclass(frozen=True)
class QuantitySums:
    """Per-row sums of m quantities v, each per token or with one value per row.

    Attributes:
        of_tokens: (m,), whether the shares outside the bounds are shares of tokens instead of rows.
        table: (8, m, B) float64, in the order of ``MEASURES``: sums of v and v^2 over the row's tokens; sums of
            c - about and its square, with c = v clamped to its bounds; extremes of v, undefined for a row without
            tokens; number of tokens beyond the upper and the lower bound.
    """

    of_tokens: Truths
    table: Numbers

    def __getitem__(self, measure: str) -> Numbers:
        """Return one of ``MEASURES``, (m, B)."""
        return self.table[MEASURES.index(measure)]

    def select_quantities(self, part: slice | Sequence[int]) -> QuantitySums:
        """Return some of the quantities."""
        return QuantitySums(self.of_tokens[part], self.table[:, part])

    def select_rows(self, rows: Truths | slice) -> QuantitySums:
        """Return the sums of some of the rows."""
        return QuantitySums(self.of_tokens, self.table[:, :, rows])

    def concatenate(self, other: QuantitySums) -> QuantitySums:
        """Return the quantities of both objects, those of this object first."""
        of_tokens = np.concatenate([self.of_tokens, other.of_tokens])
        return QuantitySums(of_tokens, np.concatenate([self.table, other.table], axis=1))


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
    deviation = np.clip(values, clamp[0][:, None], clamp[1][:, None]) - about
    sums = [tokens * each for each in (values, np.square(values), deviation, np.square(deviation))]
    table = np.stack([*sums, values, values, *(tokens * side for side in outside)])
    return QuantitySums(np.zeros(len(values), dtype=np.bool_), table)


class TorchBatch:
    """Log-probs and mask of a batch, read with torch operations.

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
        """Read the batch once, and return the row sums and the sums of the per-token quantities."""
        rows, valid = self._rows, self._valid
        above, k2, k3 = compute_excess(self._log_rho), *(compute_divergence(n, self._log_rho) for n in ("k2", "k3"))
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
        of_rows, of_quantities = np.split(table, [len(columns)])
        of_quantities = of_quantities.reshape(len(quantities), len(MEASURES), rows.count).swapaxes(0, 1)
        return RowSums(*of_rows), QuantitySums(np.ones(len(quantities), dtype=np.bool_), of_quantities)

    def compute_token_weights(self, quantity: Quantity, factor: float) -> Tensor:
        """Compute weights of kind ``capped`` or ``banded``, divided by ``factor``, in float32 or wider.

        Weights have the batch's layout, and are 0 outside valid tokens.
        """
        return self._as_weights(self._values(quantity) / factor)

    def spread_row_weights(self, rows: Numbers) -> Tensor:
        """Spread the weights of the rows, (B,), over their valid tokens, in the form of ``compute_token_weights``."""
        return self._as_weights(self._by_token(rows))

    def apply_rejections(self, rows: Truths, quantities: Sequence[Quantity]) -> tuple[Tensor, Numbers]:
        """Drop rejected ``rows``, (B,), and tokens outside the bounds of a quantity from the mask.

        Returns:
            The mask, in its own dtype, and the number of valid tokens that each row lost, (B,).
        """
        keep = self._valid & ~self._by_token(rows)
        for quantity in quantities:
            above, below = self._outside(quantity)
            keep &= ~(above | below)
        mask = torch.where(keep, self._mask, torch.zeros_like(self._mask))
        return self._rows.to_given_layout(mask), self._rows.sum(self._valid & ~keep).flatten().cpu().numpy()

    def _as_weights(self, values: Tensor) -> Tensor:
        return self._rows.to_given_layout(torch.where(self._valid, values, 0.0).to(self._dtype))

    def _by_token(self, rows: Numbers | Truths) -> Tensor:
        """Spread one value per row over the row's tokens."""
        return self._rows.broadcast(self._rows.to_column(torch.from_numpy(rows).to(self.device)))

    def _measure(self, quantity: Quantity) -> list[Tensor]:
        rows, values, valid = self._rows, self._values(quantity), self._valid
        deviation = torch.where(valid, values.clamp(*quantity.clamp) - quantity.about, 0.0)
        counted = torch.where(valid, values, 0.0)
        return [
            *(rows.sum(each) for each in (counted, counted.square(), deviation, deviation.square())),
            -rows.max(torch.where(valid, -values, -math.inf)),  # ``min`` supports only integers
            rows.max(torch.where(valid, values, -math.inf)),
            *(rows.sum((valid & outside).double()) for outside in self._outside(quantity)),
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


_BLOCK = 2**18
"""Number of tokens to convert per block if a tensor cannot be read in place."""


class CompiledBatch:
    """``TorchBatch`` on the CPU in compiled loops: each row's valid tokens are read once, without temporaries.

    Contiguous tensors are read in place if the log-probs have the same dtype, float32 or float64, and the mask is int64
    or bool; other tensors are converted block by block. Numba is imported by the constructor.
    """

    device = torch.device("cpu")

    def __init__(self, rows: RowLayout, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> None:
        from . import loops

        self._loops, self._rows = loops, rows
        self._given = [rows.tokens(each.detach()) for each in (old_log_prob, rollout_log_prob, response_mask)]
        self._mask = self._given[2]
        dtype = promote_weight_dtype(old_log_prob, rollout_log_prob)
        # The loops are compiled for each dtype.
        mask_dtype = response_mask.dtype if response_mask.dtype in (torch.int64, torch.bool) else torch.bool
        self._dtypes = (dtype, dtype, mask_dtype)
        if isinstance(rows, PackedRows):
            self._offsets = rows.offsets.numpy().astype(np.int64, copy=False)
        else:
            self._offsets = np.arange(rows.count + 1, dtype=np.int64) * self._mask.shape[1]
        self._ends = self._offsets[1:]

    def sweep(self, quantities: Sequence[Quantity]) -> tuple[RowSums, QuantitySums]:
        columns, measures, ends = [], [], []
        for rows, tokens, read in self._read_parts():
            count = rows.stop - rows.start
            columns.append(np.zeros((len(RowSums._fields), count)))
            measures.append(np.zeros((len(MEASURES), len(quantities), count)))
            end = np.empty(count, dtype=np.int64)
            self._loops.sweep(read, EXP_CLAMP, _pack(quantities), end, columns[-1], measures[-1])
            ends.append(end + tokens.start)
        self._ends = np.concatenate(ends)  # later passes stop at the end of each row's mask
        table = np.concatenate(measures, axis=-1)
        return RowSums(*np.concatenate(columns, axis=-1)), QuantitySums(np.ones(len(quantities), dtype=np.bool_), table)

    def compute_token_weights(self, quantity: Quantity, factor: float) -> Tensor:
        weights, asked = self._zeros(0), _pack([quantity])
        for _, tokens, read in self._read_parts():
            self._loops.compute_token_weights(read, EXP_CLAMP, asked, float(factor), weights[tokens])
        return self._as_given(weights)

    def spread_row_weights(self, rows: Numbers) -> Tensor:
        weights = self._zeros(0)
        for part, tokens, read in self._read_parts():
            self._loops.spread_row_weights(read, rows[part], weights[tokens])
        return self._as_given(weights)

    def apply_rejections(self, rows: Truths, quantities: Sequence[Quantity]) -> tuple[Tensor, Numbers]:
        kept, gone, asked = self._zeros(2), np.zeros(self._rows.count), _pack(quantities)
        for part, tokens, read in self._read_parts():
            self._loops.apply_rejections(read, EXP_CLAMP, rows[part], asked, kept[tokens], gone[part])
        if self._mask.dtype in (torch.int64, torch.bool):
            return self._as_given(kept), gone
        # A mask that was read as bool is converted back to its own dtype and values.
        keep = torch.from_numpy(kept).view(self._mask.shape)
        return self._rows.to_given_layout(torch.where(keep, self._mask, torch.zeros_like(self._mask))), gone

    def _read_parts(self) -> Iterator[tuple[slice, slice, tuple[NDArray[Any], ...]]]:
        """Yield the parts of the batch: their rows, their tokens, and the arrays that the compiled loops read.

        The whole batch is one part, unless a tensor must be converted; each part then has about ``_BLOCK`` tokens.
        """
        pairs, count = list(zip(self._given, self._dtypes, strict=True)), self._rows.count
        in_place = all(each.dtype == dtype and each.is_contiguous() for each, dtype in pairs)
        start, stop = 0, -1
        while stop < count:
            last = np.searchsorted(self._offsets, self._offsets[start] + _BLOCK, side="right") - 1
            stop = count if in_place else min(max(int(last), start + 1), count)
            rows, tokens = slice(start, stop), slice(int(self._offsets[start]), int(self._offsets[stop]))
            parts = (each[rows if each.dim() == 2 else tokens].to(dtype) for each, dtype in pairs)
            read = (each.contiguous().view(-1).numpy() for each in parts)
            yield rows, tokens, (*read, self._offsets[rows] - tokens.start, self._ends[rows] - tokens.start)
            start = stop

    def _zeros(self, like: int) -> NDArray[Any]:
        """Allocate (N,) zeros; pages that are never written, which are mostly padding, do not use memory."""
        return np.zeros(self._mask.numel(), dtype=torch.empty(0, dtype=self._dtypes[like]).numpy().dtype)

    def _as_given(self, tokens: NDArray[Any]) -> Tensor:
        return self._rows.to_given_layout(torch.from_numpy(tokens).view(self._mask.shape))


def _pack(quantities: Sequence[Quantity]) -> tuple[NDArray[Any], ...]:
    """Pack the quantities for the loops, as ``asked``."""
    return (
        np.array([get_args(Kind).index(quantity.kind) for quantity in quantities], dtype=np.int64),
        np.array([quantity.lower for quantity in quantities], dtype=np.float32),
        np.array([quantity.upper for quantity in quantities], dtype=np.float32),
        np.array([quantity.bounds[1] for quantity in quantities], dtype=np.float64),
        np.array([quantity.clamp for quantity in quantities], dtype=np.float64).reshape(-1, 2),
    )
