"""Recordings of runs whose pi_old does not come from the trainer's own forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording, Rows
from tests.support.recordings import record

MADE_OF_MU: dict[str, dict[str, Any]] = {
    "bypass": {"proximal": "bypass"},
    "same_engine": {"proximal": "same_engine"},
    "loglinear": {"proximal": "loglinear", "alpha": 0.5},
}
EVERY = MADE_OF_MU | {"reuse": {"proximal": "reuse"}, "recompute": {"proximal": "recompute"}}


def recorded_under(proximal: str, directory: Path, *steps: Rows) -> Recording:
    """Record ``steps`` as a run with ``EVERY[proximal]`` would; with ``recompute``, they are unchanged."""
    spec = CorrectionSpec.from_mapping(EVERY[proximal])
    seen = [replace(rows, old_log_prob=_taken(proximal, rows)) for rows in steps]
    return Recording(record(directory, *seen, spec=spec.to_mapping()))


def _taken(proximal: str, rows: Rows) -> np.ndarray:
    mu, pi = rows.rollout_log_prob, rows.log_prob
    if proximal == "loglinear":
        return mu + np.float32(EVERY[proximal]["alpha"]) * (pi - mu)
    return {"bypass": mu, "same_engine": mu, "reuse": pi, "recompute": rows.old_log_prob}[proximal]
