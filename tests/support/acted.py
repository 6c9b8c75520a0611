"""Drawn rows with the weights and rejections of a correction, as a recorder would write them: one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage
from recipe.offpolicy.recording import Rows
from tests.support.recordings import drawn_rows, record, sampled_by


def acted(rows: Rows, spec: CorrectionSpec) -> tuple[Rows, tuple[str, ...]]:
    """Return the rows with the weights and rejections of ``spec``, and the names of the bits of ``rejected_by``."""
    padded = rows.padded("rollout_log_prob", "old_log_prob", "log_prob", "advantages", "turn", "token_staleness")
    mask = padded["response_mask"]
    stage = rollout_stage(
        spec,
        old_log_prob=padded["old_log_prob"],
        rollout_log_prob=padded["rollout_log_prob"],
        response_mask=mask,
        segment_ids=padded["turn"].long(),
        staleness=padded["token_staleness"].clamp(min=0),
        measure="nothing",
    )
    step = step_stage(spec, stage, log_prob=padded["log_prob"], advantages=padded["advantages"])
    reasons = tuple(step.rejected)
    bits = torch.zeros_like(mask, dtype=torch.int64)
    for bit, reason in enumerate(reasons):
        bits |= (step.rejected[reason] & stage.valid).long() << bit
    lengths = np.diff(rows.offsets)
    place = np.arange(mask.shape[1])[None, :] < lengths[:, None]
    weight = step.weight.numpy()[place].astype(np.float32)
    return replace(rows, weight=weight, rejected_by=bits.numpy()[place].astype(np.uint32)), reasons


def varied_rows(count: int = 60, *, seed: int = 0, step: int = 5, **columns: Any) -> Rows:
    """Draw rows of 1 to about 400 tokens whose noise exceeds bounds, with several turns separated by tool tokens, and
    staleness 0 to 3.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(3.5, 1.3, count)), 1, 400).astype(int)
    rows = drawn_rows(lengths.tolist(), seed=seed, step=step, backend=0.3, drift=0.05)
    turn = rows.position // 30
    mask = rows.position % 30 < 25
    oldest = step - 1 - rng.integers(0, 4, count)
    rows = replace(
        rows,
        response_mask=mask,
        length=np.add.reduceat(mask.astype(np.int32), rows.offsets[:-1]).astype(np.int32),
        turn=np.where(mask, turn, -1).astype(np.int16),
    )
    return replace(sampled_by(rows, oldest), **columns)


def recorded(directory: Path, spec: CorrectionSpec, *steps: Rows) -> Path:
    """A recording of ``steps`` under ``spec``."""
    for rows in steps:
        done, reasons = acted(rows, spec)
        record(directory, done, spec=spec.to_mapping(), reasons=reasons)
    return directory


def by_hand(old: Sequence[Sequence[float]], mu: Sequence[Sequence[float]], **columns: Any) -> Rows:
    """Build rows with these log-probs, where pi = pi_old unless ``columns`` say otherwise; per-token columns are packed
    end to end.
    """
    flat = [np.concatenate([np.asarray(row, dtype=np.float32) for row in rows]) for rows in (old, mu)]
    given = {"old_log_prob": flat[0], "log_prob": flat[0], "rollout_log_prob": flat[1]} | columns
    return drawn_rows([len(row) for row in old], **given)
