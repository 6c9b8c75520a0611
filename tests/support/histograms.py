"""Histograms of distances, as a worker reports them."""

from __future__ import annotations

from torch import Tensor

from recipe.offpolicy.correction import Reduction, Statistic
from recipe.offpolicy.monitor.moving_bounds import EDGES, sum_by_bin


def histogram(distance: Tensor, counted: Tensor) -> Statistic:
    """Count the units in ``counted`` by the bin of their distance."""
    return Statistic(Reduction.SUM, tuple(sum_by_bin(EDGES, distance, counted[None])[0].tolist()))
