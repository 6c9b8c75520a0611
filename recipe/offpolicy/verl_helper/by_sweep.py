"""A batch read by compiled loops on the CPU: each row's valid tokens once, in float64, without a temporary.

The loops are compiled by numba when they are first called, in about two seconds, and kept beside this file or, where
that cannot be written, in the user's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from ..correction.ratios import EXP_CLAMP, weight_dtype
from .columns import Columns, Kind, Measure, Quantity

RAW, CAPPED, BANDED, K1, K2, K3 = range(6)
_CODES: dict[Kind, int] = {"raw": RAW, "capped": CAPPED, "banded": BANDED, "k1": K1, "k2": K2, "k3": K3}
_COLUMNS = ("response", "tokens", "old", "rollout", "log_ratio", "k2", "k3", "k2_max", "k3_max", "chi2")
_MEASURES = ("total", "square", "deviation", "squared_deviation", "least", "greatest", "above", "below")
_BLOCK = 2**18
"""Tokens that are converted at a time where a tensor cannot be read as it lies."""

_NEAR = 0.25
_SERIES = tuple(1 / math.factorial(k) for k in range(1, 13))
_compiled = njit(cache=True, fastmath={"contract"}, nogil=True)
_inlined = njit(cache=True, fastmath={"contract"}, inline="always")


class SweptBatch:
    """See ``columns.Batch``.

    Args:
        old_log_prob, rollout_log_prob: (B, T) on the CPU, any float dtype.
        response_mask: (B, T) bool, integer or float 0/1, on the CPU.
    """

    def __init__(self, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> None:
        self._dtype = weight_dtype(old_log_prob, rollout_log_prob)
        self._log_probs = old_log_prob.detach(), rollout_log_prob.detach()
        self._given = response_mask
        self._mask = response_mask if response_mask.dtype in (torch.int64, torch.bool) else response_mask.bool()

    def sweep(self, quantities: Sequence[Quantity]) -> tuple[Columns, list[Measure]]:
        rows = len(self._mask)
        columns, measures = np.zeros((len(_COLUMNS), rows)), np.zeros((len(quantities), len(_MEASURES), rows))
        asked = _asked(quantities)
        for start, old, rollout, mask in self._blocks():
            _sweep(old, rollout, mask, start, *asked, columns, measures)
        of_rows = Columns(**{name: torch.from_numpy(column) for name, column in zip(_COLUMNS, columns, strict=True)})
        return of_rows, [
            Measure("token", quantity.about, **{n: torch.from_numpy(c) for n, c in zip(_MEASURES, table, strict=True)})
            for quantity, table in zip(quantities, measures, strict=True)
        ]

    def token_weights(self, quantity: Quantity, factor: Tensor | float) -> Tensor:
        weights = self._zeros()
        kinds, lower, upper, bounds, _ = _asked([quantity])
        for start, old, rollout, mask in self._blocks():
            _token_weights(old, rollout, mask, start, kinds[0], lower[0], upper[0], bounds[0], float(factor), weights)
        return torch.from_numpy(weights)

    def row_weights(self, rows: Tensor) -> Tensor:
        weights, values = self._zeros(), rows.numpy()
        for start, old, rollout, mask in self._blocks():
            _row_weights(old, rollout, mask, start, values, weights)
        return torch.from_numpy(weights)

    def kept(self, rows: Tensor, quantities: Sequence[Quantity]) -> tuple[Tensor, Tensor]:
        # Memory that is never written to is never there: most of it is padding.
        dtype = np.int64 if self._mask.dtype == torch.int64 else np.bool_
        mask: NDArray[Any] = np.zeros(self._mask.shape, dtype=dtype)
        gone, rejected = np.zeros(len(self._mask)), rows.numpy()
        kinds, lower, upper, *_ = _asked(quantities)
        for start, old, rollout, given in self._blocks():
            _kept(old, rollout, given, start, rejected, kinds, lower, upper, mask, gone)
        keep = torch.from_numpy(mask)
        if keep.dtype != self._given.dtype:
            keep = torch.where(keep, self._given, torch.zeros_like(self._given))
        return keep, torch.from_numpy(gone)

    def _zeros(self) -> NDArray[Any]:
        return np.zeros(self._mask.shape, dtype=np.float64 if self._dtype == torch.float64 else np.float32)

    def _blocks(self) -> Iterator[tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """First row, log pi_old, log mu and mask of a few rows, or of all where nothing has to be converted."""
        rows, width = self._mask.shape
        tensors = (*self._log_probs, self._mask)
        wanted = (self._dtype, self._dtype, self._mask.dtype)
        as_they_lie = all(t.dtype == dtype and t.is_contiguous() for t, dtype in zip(tensors, wanted, strict=True))
        height = max(rows if as_they_lie else _BLOCK // max(width, 1), 1)
        for start in range(0, rows, height):
            part = slice(start, start + height)
            old, rollout, mask = (t[part].to(d).contiguous().numpy() for t, d in zip(tensors, wanted, strict=True))
            yield start, old, rollout, mask


def _asked(quantities: Sequence[Quantity]) -> tuple[NDArray[Any], ...]:
    """Kind, lower and upper in float32, bounds of the weight, and bounds of the clamp, one row a quantity."""
    count = len(quantities)
    return (
        np.array([_CODES[quantity.kind] for quantity in quantities], dtype=np.int64),
        np.array([quantity.lower for quantity in quantities], dtype=np.float32),
        np.array([quantity.upper for quantity in quantities], dtype=np.float32),
        np.array([quantity.bounds for quantity in quantities], dtype=np.float64).reshape(count, 2),
        np.array([quantity.clamp for quantity in quantities], dtype=np.float64).reshape(count, 2),
    )


@_inlined
def _excess(x: float) -> float:
    """exp(x) - 1 with x clamped to +-20; by its series, to 1e-17, where policies are near each other."""
    if -_NEAR <= x <= _NEAR:
        s = _SERIES
        x2 = x * x
        x4 = x2 * x2
        low = (s[0] + s[1] * x) + x2 * (s[2] + s[3] * x)
        middle = (s[4] + s[5] * x) + x2 * (s[6] + s[7] * x)
        high = (s[8] + s[9] * x) + x2 * (s[10] + s[11] * x)
        return x * (low + x4 * (middle + x4 * high))
    return math.expm1(min(max(x, -EXP_CLAMP), EXP_CLAMP))


@_inlined
def _value(kind: int, x: float, above_one: float, inside: bool, bounds: Any) -> float:
    """What ``Quantity.kind`` says, from the log-ratio and r - 1."""
    if kind == K1:
        return -x
    if kind == K2:
        return 0.5 * x * x
    if kind == K3:
        return above_one - x
    if kind == CAPPED:
        return min(above_one + 1.0, bounds[1])
    return above_one + 1.0 if kind == RAW or inside else 0.0


@_compiled
def _sweep(
    old: Any,
    rollout: Any,
    mask: Any,
    start: int,
    kinds: Any,
    lower: Any,
    upper: Any,
    bounds: Any,
    clamps: Any,
    columns: Any,
    measures: Any,
) -> None:
    count = len(kinds)
    sums = np.empty((count, 8))
    for i in range(len(old)):
        response = tokens = 0
        old_sum = rollout_sum = x_sum = k2_sum = k3_sum = k2_max = k3_max = chi2_sum = 0.0
        sums[:] = 0.0
        sums[:, 4], sums[:, 5] = np.inf, -np.inf
        for j in range(old.shape[1]):
            if not mask[i, j]:
                continue
            response += 1
            p, q = np.float64(old[i, j]), np.float64(rollout[i, j])
            if not (math.isfinite(p) and math.isfinite(q)):
                continue
            x = p - q
            above_one = _excess(x)
            k2, k3 = 0.5 * x * x, above_one - x
            tokens += 1
            old_sum += p
            rollout_sum += q
            x_sum += x
            k2_sum += k2
            k3_sum += k3
            k2_max, k3_max = max(k2_max, k2), max(k3_max, k3)
            chi2_sum += above_one * (above_one + 2.0)
            for n in range(count):
                kind = kinds[n]
                compared = np.float32(x if kind <= BANDED else _value(kind, x, above_one, True, bounds[n]))
                above, below = compared > upper[n], compared < lower[n]
                value = _value(kind, x, above_one, not (above or below), bounds[n])
                about = 1.0 if kind <= BANDED else 0.0
                deviation = min(max(value, clamps[n, 0]), clamps[n, 1]) - about
                s = sums[n]
                s[0] += value
                s[1] += value * value
                s[2] += deviation
                s[3] += deviation * deviation
                s[4], s[5] = min(s[4], value), max(s[5], value)
                s[6] += above
                s[7] += below
        row = start + i
        columns[0, row], columns[1, row] = response, tokens
        columns[2, row], columns[3, row], columns[4, row] = old_sum, rollout_sum, x_sum
        columns[5, row], columns[6, row], columns[7, row], columns[8, row] = k2_sum, k3_sum, k2_max, k3_max
        columns[9, row] = chi2_sum
        measures[:, :, row] = sums


@_compiled
def _token_weights(
    old: Any,
    rollout: Any,
    mask: Any,
    start: int,
    kind: int,
    lower: Any,
    upper: Any,
    bounds: Any,
    factor: float,
    weights: Any,
) -> None:
    for i in range(len(old)):
        for j in range(old.shape[1]):
            if mask[i, j]:
                p, q = np.float64(old[i, j]), np.float64(rollout[i, j])
                if math.isfinite(p) and math.isfinite(q):
                    x = p - q
                    compared = np.float32(x)
                    inside = not (compared > upper or compared < lower)
                    weights[start + i, j] = _value(kind, x, _excess(x), inside, bounds) / factor


@_compiled
def _row_weights(old: Any, rollout: Any, mask: Any, start: int, rows: Any, weights: Any) -> None:
    for i in range(len(old)):
        for j in range(old.shape[1]):
            if mask[i, j] and math.isfinite(old[i, j]) and math.isfinite(rollout[i, j]):
                weights[start + i, j] = rows[start + i]


@_compiled
def _kept(
    old: Any,
    rollout: Any,
    mask: Any,
    start: int,
    rejected: Any,
    kinds: Any,
    lower: Any,
    upper: Any,
    kept: Any,
    gone: Any,
) -> None:
    nothing = np.zeros(2)
    for i in range(len(old)):
        row = start + i
        for j in range(old.shape[1]):
            if not mask[i, j]:
                continue
            p, q = np.float64(old[i, j]), np.float64(rollout[i, j])
            if not (math.isfinite(p) and math.isfinite(q)):
                continue
            drop = rejected[row]
            if not drop:
                x = p - q
                above_one = _excess(x)
                for n in range(len(kinds)):
                    compared = np.float32(_value(kinds[n], x, above_one, True, nothing))
                    drop = drop or compared > upper[n] or compared < lower[n]
            if drop:
                gone[row] += 1.0
            else:
                kept[row, j] = mask[i, j]
