"""Compiled CPU backend of the batch sweep: each row's valid tokens are read once, in float64, without temporaries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..correction.ratios import EXP_CLAMP, promote_weight_dtype
from ..correction.row_layout import PackedRows, RowLayout
from . import loops
from .row_sums import COLUMNS, MEASURES, Kind, Numbers, Quantity, QuantitySums, RowSums, Truths

_CODES: dict[Kind, int] = {
    "raw": loops.RAW,
    "capped": loops.CAPPED,
    "banded": loops.BANDED,
    "k1": loops.K1,
    "k2": loops.K2,
    "k3": loops.K3,
}
_BLOCK = 2**18
"""Number of tokens that are converted at once if a tensor cannot be read in place."""


class CompiledBatch:
    """CPU backend of ``row_sums.Batch`` with compiled loops.

    Args:
        rows: layout of the tensors.
        old_log_prob, rollout_log_prob: on the CPU, any float dtype.
        response_mask: bool, integer or float 0/1, on the CPU.
    """

    device = torch.device("cpu")

    def __init__(self, rows: RowLayout, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> None:
        self._rows = rows
        self._dtype = promote_weight_dtype(old_log_prob, rollout_log_prob)
        tensors = (old_log_prob.detach(), rollout_log_prob.detach(), response_mask)
        self._tensors = tuple(rows.tokens(tensor) for tensor in tensors)
        # The loops are compiled for each dtype. Masks of the two most common dtypes are read in place; other masks are
        # converted to bool.
        mask_dtype = response_mask.dtype if response_mask.dtype in (torch.int64, torch.bool) else torch.bool
        self._dtypes = (self._dtype, self._dtype, mask_dtype)
        self._offsets = _offsets(rows, self._tensors[0])
        self._starts = self._offsets[:-1]
        self._ends = self._offsets[1:]

    def sweep(self, quantities: Sequence[Quantity]) -> tuple[RowSums, QuantitySums]:
        count = self._rows.count
        columns, measures = np.zeros((len(COLUMNS), count)), np.zeros((len(MEASURES), len(quantities), count))
        ends = self._starts.copy()  # later passes stop at the end of each row's mask
        asked = _asked(quantities)
        for rows, tokens, read in self._parts():
            loops.sweep(*read, EXP_CLAMP, *asked, ends[rows], rows.start, columns, measures)
            ends[rows] += tokens.start  # the loops count positions from the start of a part
        self._ends = ends
        return RowSums.from_table(columns), QuantitySums.from_token_table(quantities, measures)

    def compute_token_weights(self, quantity: Quantity, factor: float) -> Tensor:
        weights = self._zeros(self._dtype)
        kinds, lower, upper, caps, _ = _asked([quantity])
        bounds = (kinds[0], lower[0], upper[0], caps[0])
        for _, tokens, read in self._parts():
            loops.compute_token_weights(*read, EXP_CLAMP, *bounds, float(factor), weights[tokens])
        return self._as_given(torch.from_numpy(weights))

    def spread_row_weights(self, rows: Numbers) -> Tensor:
        weights = self._zeros(self._dtype)
        for part, tokens, read in self._parts():
            loops.spread_row_weights(*read, rows[part], weights[tokens])
        return self._as_given(torch.from_numpy(weights))

    def apply_rejections(self, rows: Truths, quantities: Sequence[Quantity]) -> tuple[Tensor, Numbers]:
        mask, gone = self._zeros(self._dtypes[2]), np.zeros(self._rows.count)
        kinds, lower, upper, *_ = _asked(quantities)
        for part, tokens, read in self._parts():
            loops.apply_rejections(*read, EXP_CLAMP, rows[part], kinds, lower, upper, mask[tokens], gone[part])
        # A mask that was read as bool is converted back to its own dtype and values.
        keep, given = torch.from_numpy(mask), self._tensors[2]
        if keep.dtype != given.dtype:
            keep = torch.where(keep.view(given.shape), given, torch.zeros((), dtype=given.dtype))
        return self._as_given(keep), gone

    def _as_given(self, tokens: Tensor) -> Tensor:
        return self._rows.to_given_layout(tokens.view(self._tensors[0].shape))

    def _zeros(self, dtype: torch.dtype) -> NDArray[Any]:
        """Allocate (N,) zeros; pages that are never written, which are mostly padding, do not use memory."""
        return np.zeros(self._tensors[0].numel(), dtype=torch.empty(0, dtype=dtype).numpy().dtype)

    def _parts(self) -> Iterator[tuple[slice, slice, tuple[NDArray[Any], ...]]]:
        """Yield the batch in parts of at most ``_BLOCK`` tokens, or as a whole if no tensor needs a conversion.

        A part consists of the rows, their flat tokens, log pi_old, log mu and mask of these tokens, and the start and
        stop of each row among the tokens.
        """
        pairs = list(zip(self._tensors, self._dtypes, strict=True))
        if all(tensor.dtype == dtype and tensor.is_contiguous() for tensor, dtype in pairs):
            edges = [0, self._rows.count]
        else:
            edges = _edges(self._offsets[1:])
        for first, last in itertools.pairwise(edges):
            rows, offset = slice(first, last), int(self._starts[first]) if first < last else 0
            old, rollout, mask = (self._part(tensor, rows).to(dtype).contiguous().numpy() for tensor, dtype in pairs)
            read = (old, rollout, mask, self._starts[rows] - offset, self._ends[rows] - offset)
            yield rows, slice(offset, offset + len(old)), read

    def _part(self, tokens: Tensor, rows: slice) -> Tensor:
        """Return the flat tokens of some rows; they are copied only if they are not contiguous."""
        if tokens.dim() == 2:
            return tokens[rows].reshape(-1)
        return tokens[int(self._offsets[rows.start]) : int(self._offsets[rows.stop])]


def _offsets(rows: RowLayout, tokens: Tensor) -> NDArray[np.int64]:
    """Compute (B + 1,) offsets of the rows among the flat tokens."""
    if isinstance(rows, PackedRows):
        return rows.offsets.numpy().astype(np.int64, copy=False)
    return np.arange(rows.count + 1, dtype=np.int64) * tokens.shape[1]


def _edges(stops: NDArray[np.int64]) -> list[int]:
    """Choose the rows between which to cut, so that each part has at most ``_BLOCK`` tokens, or consists of one row."""
    edges, start = [0], 0
    for row in range(1, len(stops)):
        if stops[row] - start > _BLOCK:
            edges.append(row)
            start = int(stops[row - 1])
    return [*edges, len(stops)]


def _asked(quantities: Sequence[Quantity]) -> tuple[NDArray[Any], ...]:
    """Pack the quantities for the loops: kind, lower and upper in float32, cap of the weight, and (m, 2) clamps."""
    return (
        np.array([_CODES[quantity.kind] for quantity in quantities], dtype=np.int64),
        np.array([quantity.lower for quantity in quantities], dtype=np.float32),
        np.array([quantity.upper for quantity in quantities], dtype=np.float32),
        np.array([quantity.bounds[1] for quantity in quantities], dtype=np.float64),
        np.array([quantity.clamp for quantity in quantities], dtype=np.float64).reshape(-1, 2),
    )
