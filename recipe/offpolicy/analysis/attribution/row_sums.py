"""Sums of recorded rows from which their mismatch is decomposed, and those that set the routing part apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...monitor.mismatch.sums import SHAPE, compute_sums_by_row
from ...recording import Rows
from ...recording.schema import WITHOUT_REPLAY

CHUNK: Final = 1 << 20
"""Padded tokens of one batch, which bounds memory."""

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


def compute_row_sums(rows: Rows) -> Array:
    """Compute ``mismatch.sums.compute_sums_by_row`` of recorded rows: (N, *SHAPE)."""
    # Rows are padded to the longest of all, so a chunk holds this many.
    longest = max(int(np.diff(rows.offsets).max(initial=1)), 1)
    at_once = max(CHUNK // longest, 1)
    parts = [np.zeros((0, *SHAPE))]
    for start in range(0, len(rows), at_once):
        some = rows.take(np.arange(start, min(start + at_once, len(rows))))
        columns = some.padded("rollout_log_prob", "old_log_prob", "log_prob", "token_staleness")
        parts.append(compute_sums_by_row(staleness=columns.pop("token_staleness"), **columns).numpy())
    return np.concatenate(parts)


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
