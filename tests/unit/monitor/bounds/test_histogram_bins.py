"""Sums by bin, and the rule by which each statistic of a histogram is merged over micro-batches and ranks."""

from __future__ import annotations

import math

import torch

from recipe.offpolicy.correction.statistics import Reduction
from recipe.offpolicy.monitor.bounds.histogram import ESS, KEPT, get_reduction, sum_by_bin


def test_a_distance_lies_in_the_bin_that_its_edge_closes() -> None:
    """Edges 1 and 2: 0.5 and 1 in the first bin, 1.5 in the second, 3 and NaN beyond."""
    distance = torch.tensor([[0.5, 1.0, 1.5], [3.0, math.nan, 2.0]])
    columns = torch.stack([torch.ones(2, 3), torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])])
    assert sum_by_bin((1.0, 2.0), distance, columns).tolist() == [[2.0, 2.0, 2.0], [3.0, 36.0, 24.0]]


def test_shares_are_averaged_and_counts_added() -> None:
    assert get_reduction(ESS) is Reduction.ESS
    assert get_reduction(f"gsm/{KEPT}") is Reduction.MEAN
    assert get_reduction("gsm/tokens") is Reduction.SUM
