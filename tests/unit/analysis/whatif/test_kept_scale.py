"""The effect of ``denominator=kept`` and ``baseline=exclude`` on a replay: by hand, and compared with training's
scales.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.analysis.whatif.candidates import Candidate
from recipe.offpolicy.analysis.whatif.replay import RecordedLoss, count_kept
from recipe.offpolicy.analysis.whatif.study import Study, run_study
from recipe.offpolicy.batch.plan import SCALE, BatchSplit, build_row_columns
from recipe.offpolicy.correction import BatchConstants
from recipe.offpolicy.correction.decisions import HAS_DENOMINATOR, assign_mini_batches
from recipe.offpolicy.recording import Recording, Rows
from tests.support.acted import acted, by_hand, varied_rows
from tests.support.corrections import TIS, band, spec
from tests.support.recordings import record

LOG2 = math.log(2.0)
# pi_old / mu by token: row 0 (A = 1): 4, 1, 1/2, geometric mean 1.26; row 1 (A = -2): 2, 2.
MU = [[-3.0, -2.0, -1.0], [-2.0, -2.0]]
OLD = [[-3.0 + 2 * LOG2, -2.0, -1.0 - LOG2], [-2.0 + LOG2, -2.0 + LOG2]]
ROWS = by_hand(OLD, MU, advantages=np.array([1, 1, 1, -2, -2], dtype=np.float32))
ORIGINAL = spec(None, band=band(0.5, 1.7))  # rejects row 1
KEPT = replace(ORIGINAL, denominator="kept")


def card(mode: str | None = "token-mean", rows: int = 2, **record: Any) -> dict[str, Any]:
    """The card of a run whose mini-batches have ``rows`` rows, two per prompt."""
    actor = {"ppo_mini_batch_size": rows // 2, "loss_agg_mode": mode}
    return {"config": {"actor_rollout_ref": {"actor": actor, "rollout": {"n": 2}}, "offpolicy": {"record": record}}}


def replayed(path: Path, of: dict[str, Any], rows: Rows = ROWS) -> Study:
    """Replay ``ORIGINAL`` and ``KEPT`` over one step."""
    record(path, rows)
    (path / "run.json").write_text(json.dumps(of))
    recording = Recording(path)
    named = [Candidate(name, name, {}, one) for name, one in (("original", ORIGINAL), ("kept", KEPT))]
    return run_study(recording, recording.steps, named)


@pytest.mark.parametrize("mode", HAS_DENOMINATOR)
def test_rows_are_scaled_as_training_scales_them(tmp_path: Path, mode: str) -> None:
    rows = varied_rows(24, seed=4)
    chosen = replace(spec(TIS, gsm=band(0.97, 1.03), icepop=band(0.6, 1.7, level="token")), denominator="kept")
    padded = rows.padded("rollout_log_prob", "old_log_prob")
    names = {"rollout_log_prob": "rollout_log_probs", "old_log_prob": "old_log_probs"}
    batch = TensorDict({names.get(name, name): values for name, values in padded.items()}, batch_size=len(rows))
    trained = build_row_columns(chosen, batch, BatchSplit(ranks=2, mini_batch_rows=8, loss_agg_mode=mode))[SCALE]

    dealt = assign_mini_batches(24, ranks=2, rows_a_mini_batch=8).numpy().astype(np.int32)
    for rank in range(2):
        share = replace(rows, mini_batch=dealt, rank=np.full(24, rank, dtype=np.int32)).take(
            range(rank * 12, 12 + rank * 12)
        )
        done, reasons = acted(share, chosen)
        record(tmp_path, done, spec=chosen.to_mapping(), reasons=reasons)
    recorded = Recording(tmp_path).step(5).rows
    counts = RecordedLoss.from_card(card(mode, rows=8))
    assert counts.explain_unknown(recorded) == ""
    scale = counts.compute_scale(recorded, count_kept(chosen, chosen, recorded, BatchConstants()))
    assert torch.from_numpy(scale).tolist() == pytest.approx(trained.tolist(), rel=1e-12)
    assert len(set(scale.tolist())) > 2


@pytest.mark.parametrize(
    ("of", "rows", "reason"),
    [
        (card("token-sum"), ROWS, "loss_agg_mode=token-sum divides by an unknown count"),
        (card(rows=4), ROWS, "mini-batches do not have the 4 rows"),
        (card(), replace(ROWS, mini_batch=np.full(2, -1, dtype=np.int32)), "mini-batches do not have the 2 rows"),
    ],
)
def test_what_is_not_known_is_said_and_not_invented(
    tmp_path: Path, of: dict[str, Any], rows: Rows, reason: str
) -> None:
    result = replayed(tmp_path, of, rows)
    original, kept = (outcome.overall for outcome in result.outcomes)
    assert kept == original
    (note,) = [note for note in result.notes if "denominator=kept" in note]
    assert note.startswith("denominator=kept is replayed with the original denominator at 1 step(s)")
    assert reason in note
