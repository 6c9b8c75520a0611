"""Attribution of rows in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recipe.offpolicy.analysis.attribution.attribution import WORST, Attribution, attribute_parts, summarize_rows
from recipe.offpolicy.recording import Rows


def attribute_rows(rows: Rows, card: Mapping[str, Any], *, worst: int = WORST) -> Attribution:
    """Attribute the mismatch of rows, in the order of their steps; log pi_old comes from the trainer's own weights."""
    parts = []
    for step in np.unique(rows.step).tolist() or [0]:
        of_step = rows.take(np.flatnonzero(rows.step == step))
        parts.append((step, summarize_rows(of_step, (0, step, 0), worst=worst)))
    return attribute_parts(parts, card, worst=worst)
