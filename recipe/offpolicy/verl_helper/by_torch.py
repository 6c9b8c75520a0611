"""A batch read by torch operations, on any device; its temporaries are as large as the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..correction.ratios import divergence, excess, exp_clamped, log_ratio, valid_tokens, weight_dtype
from .columns import Columns, Measure, Quantity


class TorchBatch:
    """See ``columns.Batch``.

    Args:
        old_log_prob, rollout_log_prob: (B, T), any float dtype.
        response_mask: (B, T) bool, integer or float 0/1.
    """

    def __init__(self, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> None:
        self._log_probs = old_log_prob, rollout_log_prob
        self._mask = response_mask
        self._valid = valid_tokens(response_mask, old_log_prob, rollout_log_prob)
        self._log_rho = log_ratio(old_log_prob, rollout_log_prob, self._valid)
        self._dtype = weight_dtype(old_log_prob, rollout_log_prob)

    def sweep(self, quantities: Sequence[Quantity]) -> tuple[Columns, list[Measure]]:
        old, rollout = (torch.where(self._valid, each.detach().double(), 0.0).sum(-1) for each in self._log_probs)
        above, k2, k3 = excess(self._log_rho), divergence("k2", self._log_rho), divergence("k3", self._log_rho)
        columns = Columns(
            response=self._mask.bool().sum(-1, dtype=torch.float64),
            tokens=self._valid.sum(-1, dtype=torch.float64),
            old=old,
            rollout=rollout,
            log_ratio=self._log_rho.sum(-1),
            k2=k2.sum(-1),
            k3=k3.sum(-1),
            k2_max=_greatest(k2),
            k3_max=_greatest(k3),
            chi2=(above * (above + 2)).sum(-1),
        )
        return columns, [self._measure(quantity) for quantity in quantities]

    def token_weights(self, quantity: Quantity, factor: Tensor | float) -> Tensor:
        return torch.where(self._valid, self._values(quantity) / factor, 0.0).to(self._dtype)

    def row_weights(self, rows: Tensor) -> Tensor:
        return torch.where(self._valid, rows[:, None], 0.0).to(self._dtype)

    def kept(self, rows: Tensor, quantities: Sequence[Quantity]) -> tuple[Tensor, Tensor]:
        keep = self._valid & ~rows[:, None]
        for quantity in quantities:
            above, below = self._outside(quantity)
            keep &= ~(above | below)
        mask = torch.where(keep, self._mask, torch.zeros_like(self._mask))
        return mask, (self._valid & ~keep).sum(-1, dtype=torch.float64)

    def _measure(self, quantity: Quantity) -> Measure:
        values, valid = self._values(quantity), self._valid
        deviation = torch.where(valid, values.clamp(*quantity.clamp) - quantity.about, 0.0)
        counted = torch.where(valid, values, 0.0)
        above, below = self._outside(quantity)
        return Measure(
            level="token",
            about=quantity.about,
            total=counted.sum(-1),
            square=counted.square().sum(-1),
            deviation=deviation.sum(-1),
            squared_deviation=deviation.square().sum(-1),
            least=-_greatest(torch.where(valid, -values, -math.inf)),
            greatest=_greatest(torch.where(valid, values, -math.inf)),
            above=(valid & above).sum(-1, dtype=torch.float64),
            below=(valid & below).sum(-1, dtype=torch.float64),
        )

    def _values(self, quantity: Quantity) -> Tensor:
        if not quantity.is_weight:
            return divergence(quantity.kind, self._log_rho)
        raw = exp_clamped(self._log_rho)
        if quantity.kind == "capped":
            return raw.clamp(max=quantity.bounds[1])
        if quantity.kind == "banded":
            above, below = self._outside(quantity)
            return torch.where(above | below, 0.0, raw)
        return raw

    def _outside(self, quantity: Quantity) -> tuple[Tensor, Tensor]:
        value = self._log_rho if quantity.is_weight else divergence(quantity.kind, self._log_rho)
        return beyond(value, quantity.lower, quantity.upper)


def beyond(value: Tensor, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    """Above and below inclusive bounds, compared in float32 as the masks compare."""
    value = value.to(torch.float32)
    return value > upper, value < lower


def _greatest(values: Tensor) -> Tensor:
    return values.amax(-1) if values.shape[-1] else values.new_full(values.shape[:1], -math.inf)
