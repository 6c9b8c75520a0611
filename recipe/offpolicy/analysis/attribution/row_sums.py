"""Sums of recorded rows from which their mismatch is decomposed, and those that set the routing part apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...monitor.mismatch.sums import AGES, COLUMNS, SHAPE
from ...recording import Rows
from ...recording.schema import WITHOUT_REPLAY
from .profiles import ValidTokens, select_staleness, select_valid_tokens

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RoutingSums:
    """Sums of rows whose log pi_old is known by replayed routes, log a, and by the trainer's own, log n.

    Both are of the whole log pi/mu + R that the rows would have without replay, where R = log n - log a is the routing
    part of a token: what the trainer's own routes add at equal weights. With log a in the place of pi_old what is left
    of the whole is R + drift, with log n it is the drift.

    Attributes:
        replayed, native: (N, *SHAPE) with log a, or log n, as pi_old; of the tokens of which both are known.
    """

    replayed: Array
    native: Array


def compute_row_sums(rows: Rows, tokens: ValidTokens | None = None) -> Array:
    """Compute ``mismatch.sums.compute_sums_by_row`` of recorded rows, without padding them: (N, *SHAPE).

    Args:
        tokens: of ``rows``, see ``select_valid_tokens``, where they are there already.
    """
    tokens = tokens or select_valid_tokens(rows)
    total, gap = tokens.total, tokens.gap
    by_name = {
        "tokens": None,
        "total": total,
        "total_square": total * total,
        "gap": gap,
        "gap_square": gap * gap,
        "gap_total": gap * total,
        "gap_k3": tokens.k3,
        "total_k3": tokens.total_k3,
    }
    ages, bins, _ = SHAPE
    staleness = select_staleness(rows, tokens)
    age = np.where(staleness < 0, AGES.index("unknown"), staleness > 0)
    cell = bins * (ages * tokens.row + age) + tokens.probability
    sums = [np.bincount(cell, weights=by_name[name], minlength=len(rows) * ages * bins) for name in COLUMNS]
    return np.stack(sums, axis=-1).astype(np.float64).reshape(len(rows), *SHAPE)


def compute_routing_sums(rows: Rows) -> RoutingSums | None:
    """Compute the sums that set routing apart; None where log-probs without replay are known of no token."""
    native = rows.extensions.get(WITHOUT_REPLAY)
    if native is None or not np.isfinite(native[rows.response_mask]).any():
        return None
    # NaN where one of the two is not known, so that the token counts in neither.
    whole = rows.log_prob + (native - rows.old_log_prob)
    return RoutingSums(
        replayed=compute_row_sums(replace(rows, log_prob=whole)),
        native=compute_row_sums(replace(rows, log_prob=whole, old_log_prob=native)),
    )
