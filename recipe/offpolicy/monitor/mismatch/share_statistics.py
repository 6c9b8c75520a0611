"""Mismatch shares as statistics of each update, which add up over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

from ...correction.deferred_value import DeferredValue
from ...correction.statistics import Reduction, Statistic
from .shares import compute_shares
from .sums import compute_sums_by_row

PARTS: Final = ("rollout", "backend", "staleness", "drift")
WHOLES: Final = ("variance", "kl")


@dataclass(frozen=True)
class ShareStatistic(Statistic):
    """Share of the variance or of the KL; its parts are ``sums.compute_sums_by_row`` over all rows, flat.

    Attributes:
        whole: the quantity that is split.
        part: name of the share.
    """

    whole: Literal["variance", "kl"] = "variance"
    part: str = "rollout"

    def value(self) -> float:
        """Compute the share; NaN if it is not identified, or the whole is 0."""
        of_variance, of_kl = compute_shares([float(part) for part in self.parts])
        share = getattr(of_variance if self.whole == "variance" else of_kl, self.part)
        return math.nan if share is None else float(share)


def build_share_statistics(sums: Sequence[float]) -> dict[str, Statistic]:
    """Build ``attribution/{variance,kl}_share/{rollout,backend,staleness,drift}``.

    Args:
        sums: result of ``sums.compute_sums_by_row``, summed over rows, flat, already on the host.
    """
    parts = tuple(sums)
    return {
        f"attribution/{whole}_share/{part}": ShareStatistic(Reduction.SUM, parts, whole=whole, part=part)
        for whole in WHOLES
        for part in PARTS
    }


def defer_share_statistics(
    *,
    rollout_log_prob: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    response_mask: Tensor,
    staleness: Tensor | None,
) -> DeferredValue[dict[str, Statistic]]:
    """Compute the share statistics of some rows on the device; arguments as in ``sums.compute_sums_by_row``.

    Staleness must be None if pi_old is not a forward pass of the weights at the start of the step, because the backend
    then cannot be separated from the rest.
    """
    sums = compute_sums_by_row(rollout_log_prob, old_log_prob, log_prob, response_mask, staleness)
    return DeferredValue(sums.sum(0).flatten(), build_share_statistics)
