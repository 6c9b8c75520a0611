"""Recordings of drawn numbers, as recorders write and readers read them, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Rows
from recipe.offpolicy.recording.files import write
from recipe.offpolicy.recording.recording import file_name
from recipe.offpolicy.recording.schema import ROW_COLUMNS, TOKEN_COLUMNS, spread_versions

NONE = CorrectionSpec.from_mapping({}).to_mapping()


def drawn_rows(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    step: int = 1,
    rank: int = 0,
    backend: float = 0.01,
    drift: float = 0.0,
    group: int = 4,
    **columns: Any,
) -> Rows:
    """Rows of these lengths: log mu about -1, log pi_old = log mu + backend noise, log pi = log pi_old + drift noise.

    Args:
        backend, drift: standard deviations, in nats a token.
        group: rows of one prompt.
        columns: arrays that replace drawn ones.
    """
    rng = np.random.default_rng(seed)
    rows, tokens = len(lengths), int(sum(lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mu = -rng.exponential(1.0, tokens)
    old = mu + backend * rng.standard_normal(tokens)
    of_row = np.repeat(np.arange(rows), lengths)
    values: dict[str, Any] = {
        "step": np.full(rows, step),
        "rank": np.full(rows, rank, dtype=np.int32),
        "mini_batch": np.zeros(rows, dtype=np.int32),
        "uid": np.array([f"prompt-{row // group}" for row in range(rows)], dtype=object),
        "reward": rng.integers(0, 2, rows).astype(np.float32),
        "oldest_version": np.full(rows, step - 1),
        "newest_version": np.full(rows, step - 1),
        "length": np.asarray(lengths, dtype=np.int32),
        "offsets": offsets,
        "response_ids": rng.integers(3, 100, tokens).astype(np.int32),
        "response_mask": np.ones(tokens, dtype=bool),
        "rollout_log_prob": mu.astype(np.float32),
        "old_log_prob": old.astype(np.float32),
        "log_prob": (old + drift * rng.standard_normal(tokens)).astype(np.float32),
        "advantages": rng.standard_normal(rows)[of_row].astype(np.float32),
        "weight": np.ones(tokens, dtype=np.float32),
        "rejected_by": np.zeros(tokens, dtype=np.uint32),
        "turn": np.zeros(tokens, dtype=np.int16),
        "prompt_offsets": np.arange(rows + 1) * 2,
        "prompt_ids": rng.integers(3, 100, 2 * rows).astype(np.int32),
    }
    values |= columns
    span = (values["oldest_version"], values["newest_version"])
    values.setdefault("version", spread_versions(*span, values["response_mask"], values["offsets"]))
    return Rows(**values)


def sampled_by(rows: Rows, oldest: Any, newest: Any = None) -> Rows:
    """Mark rows as sampled by versions ``oldest`` to ``newest``, by default by one version each."""
    first, last = (np.asarray(each, dtype=np.int64) for each in (oldest, oldest if newest is None else newest))
    version = spread_versions(first, last, rows.response_mask, rows.offsets)
    return replace(rows, oldest_version=first, newest_version=last, version=version)


def same(one: Rows, other: Rows) -> bool:
    """Whether both hold the same rows, to the bit: NaN is equal to itself, and 0.0 is not -0.0."""
    for name in ("offsets", "prompt_offsets", "prompt_ids", *ROW_COLUMNS, *TOKEN_COLUMNS):
        a, b = getattr(one, name), getattr(other, name)
        if a.dtype != b.dtype or not (list(a) == list(b) if name == "uid" else a.tobytes() == b.tobytes()):
            return False
    return True


def record(directory: Path, *steps: Rows, spec: Any = NONE, reasons: Sequence[str] = ()) -> Path:
    """Write each of ``steps`` as the file of its step and rank, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for rows in steps:
        write(directory / file_name(int(rows.step[0]), int(rows.rank[0])), rows, spec, reasons)
    return directory
