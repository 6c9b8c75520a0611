"""log pi_old by the trainer's own weights, for any source of pi_old in the recorded correction.

Under ``proximal=bypass`` the recorded column is mu, under ``loglinear`` a mixture of mu and pi, so its distance from mu
says nothing about the engines. At the first gradient step of a step, pi still has the weights from its start and is
used instead; later it has moved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..correction.proximal import OF_THE_TRAINER
from .files import Step


def find_scored_rows(step: Step) -> NDArray[np.bool_]:
    """Find the rows, (N,) bool, with a known log pi_old by the trainer's own weights."""
    if step.spec.get("proximal", "recompute") in OF_THE_TRAINER:
        return np.ones(len(step.rows), dtype=bool)
    return step.rows.mini_batch == 0


def get_trainers_pi_old(step: Step) -> NDArray[np.float32]:
    """Return log pi_old of each token by the trainer's own weights, (M,) nats; NaN where unknown."""
    rows = step.rows
    if step.spec.get("proximal", "recompute") in OF_THE_TRAINER:
        return rows.old_log_prob
    return np.where(find_scored_rows(step)[rows.row_of_token], rows.log_prob, np.float32(np.nan))
