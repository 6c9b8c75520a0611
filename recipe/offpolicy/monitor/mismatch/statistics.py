"""The decomposition as statistics of each update: shares of variance and of KL that add up over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

from ...correction.deferred import Reading
from ...correction.statistics import Reduction, Statistic
from .shares import shares
from .sums import sums_by_row

PARTS: Final = ("rollout", "backend", "staleness", "drift")
WHOLES: Final = ("variance", "kl")


@dataclass(frozen=True)
class ShareStatistic(Statistic):
    """One share; its parts are the sums of ``sums.sums_by_row`` over all rows, flat.

    Attributes:
        whole: what it is a share of.
        part: whose share it is.
    """

    whole: Literal["variance", "kl"] = "variance"
    part: str = "rollout"

    def value(self) -> float:
        """The share; NaN where it is not identified, or there is nothing to share."""
        of_variance, of_kl = shares([float(part) for part in self.parts])
        share = getattr(of_variance if self.whole == "variance" else of_kl, self.part)
        return math.nan if share is None else float(share)


def share_statistics(sums: Sequence[float]) -> dict[str, Statistic]:
    """``attribution/{variance,kl}_share/{rollout,backend,staleness,drift}``.

    Args:
        sums: of ``sums.sums_by_row``, summed over rows, flat, already on the host.
    """
    parts = tuple(sums)
    return {
        f"attribution/{whole}_share/{part}": ShareStatistic(Reduction.SUM, parts, whole=whole, part=part)
        for whole in WHOLES
        for part in PARTS
    }


def attributed(
    *,
    rollout_log_prob: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    response_mask: Tensor,
    staleness: Tensor | None,
) -> Reading[dict[str, Statistic]]:
    """The shares of some rows; arguments as ``sums.sums_by_row`` has them.

    Staleness is to be None as well where pi_old is no forward pass of the weights that the step began with: then the
    backend cannot be told from the rest.
    """
    sums = sums_by_row(rollout_log_prob, old_log_prob, log_prob, response_mask, staleness)
    return Reading(sums.sum(0).flatten(), share_statistics)
