"""Torch backend of the batch sweep, for any device; its temporaries are as large as the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
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
from .row_sums import COLUMNS, MEASURES, Numbers, Quantity, QuantitySums, RowSums, Truths


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
