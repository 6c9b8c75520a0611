"""What is measured of a replayed correction, worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis.whatif import measures as module
from recipe.offpolicy.analysis.whatif.candidates import UNCORRECTED, Candidate
from recipe.offpolicy.analysis.whatif.measures import CorrectionMeasures
from recipe.offpolicy.analysis.whatif.study import CorrectionOutcome, Study, run_study
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording, Rows
from tests.support.acted import by_hand, recorded
from tests.support.corrections import TIS, band, spec

LOG2 = math.log(2.0)
# pi_old / mu by token: row 0 (A = 1): 4, 1, 1/2; row 1 (A = -2): 2, 2. All powers of two.
MU = [[-3.0, -2.0, -1.0], [-2.0, -2.0]]
OLD = [[-3.0 + 2 * LOG2, -2.0, -1.0 - LOG2], [-2.0 + LOG2, -2.0 + LOG2]]
A = np.array([1, 1, 1, -2, -2], dtype=np.float32)
TOKEN_TIS = spec(TIS)  # min(rho, 2)
BAND = spec(None, band=band(0.5, 1.7))  # geometric means: row 0 (4 * 1 * 1/2)^(1/3) = 1.26, row 1 2.0


def replayed(path: Path, rows: Rows, *specs: CorrectionSpec, acting: CorrectionSpec | None = None) -> Study:
    recording = Recording(recorded(path, acting or spec(), rows))
    named = [Candidate(f"#{place}", f"#{place}", {}, one) for place, one in enumerate(specs)]
    return run_study(recording, recording.steps, [Candidate(UNCORRECTED, UNCORRECTED), *named])


@pytest.fixture
def trust_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand there are two rows to be a reference."""
    monkeypatch.setattr(module, "FEW", 1.0)


def close(measured: CorrectionMeasures, **expected: Any) -> None:
    for name, value in expected.items():
        assert getattr(measured, name) == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.usefixtures("trust_two_rows")
def test_truncated_weights(tmp_path: Path) -> None:
    """w = 2, 1, 1/2 | 2, 2 and A = 1, 1, 1 | -2, -2; rho by token 4, 1, 1/2 | 2, 2, by row 2, 2, 2 | 4, 4."""
    outcome = replayed(tmp_path, by_hand(OLD, MU, advantages=A), TOKEN_TIS).outcomes[1]
    close(
        outcome.overall,
        tokens=5,
        rows=2,
        kept_tokens=1.0,
        kept_rows=1.0,
        # sum w = 7.5, sum w^2 = 4 + 1 + 1/4 + 4 + 4 = 13.25.
        ess=7.5**2 / (5 * 13.25),
        # A weight rejects nothing.
        mismatch_left=1.0,
        # sum (w A)^2 = 4 + 1 + 1/4 + 16 + 16 = 37.25; sum A^2 = 3 + 8 = 11.
        lr_scale=math.sqrt(37.25 / 11),
        # rho_row = 2 and 4: (2 + 4)^2 / (4 + 16).
        reference_rows=36 / 20,
        # By token only the first differs, 2 against 4: sum ((w - rho) A)^2 = 4; sum (rho A)^2 = 16 + 1 + 1/4 + 32.
        bias_token=math.sqrt(4 / 49.25),
        # Both rows have T <= 16; cells by sign: A > 0 has the shift -2 over 3 tokens, A < 0 none. (-2)^2 / 3.
        bias_token_systematic=math.sqrt(4 / 3 / 49.25),
        # By row (w - rho) A = 0, -1, -3/2 | 4, 4: 0 + 1 + 2.25 + 32 = 35.25; sum (rho A)^2 = 3 * 4 + 2 * 64 = 140.
        bias_sequence=math.sqrt(35.25 / 140),
        # (-2.5)^2 / 3 + 8^2 / 2.
        bias_sequence_systematic=math.sqrt((6.25 / 3 + 32) / 140),
    )


@pytest.mark.usefixtures("trust_two_rows")
def test_a_mask(tmp_path: Path) -> None:
    """Row 1 is rejected: f A = 1, 1, 1 | 0, 0."""
    outcome = replayed(tmp_path, by_hand(OLD, MU, advantages=A), BAND).outcomes[1]
    close(
        outcome.overall,
        kept_tokens=3 / 5,
        kept_rows=1 / 2,
        # Ones on what is kept: ESS is the kept share.
        ess=3 / 5,
        # k3 = rho - 1 - log rho: row 0 has 3 - 2 log 2, 0 and log 2 - 1/2, row 1 twice 1 - log 2.
        mismatch_left=(2.5 - LOG2) / (2.5 - LOG2 + 2 * (1 - LOG2)),
        lr_scale=math.sqrt(3 / 11),
        # (f - rho) A = -3, 0, 1/2 | 4, 4.
        bias_token=math.sqrt((9 + 0.25 + 32) / 49.25),
        # (-2.5)^2 / 3 + 8^2 / 2.
        bias_token_systematic=math.sqrt((6.25 / 3 + 32) / 49.25),
        # -1, -1, -1 | 8, 8.
        bias_sequence=math.sqrt((3 + 128) / 140),
        bias_sequence_systematic=math.sqrt((9 / 3 + 16**2 / 2) / 140),
    )
    assert outcome.groups["advantage/positive"].kept_tokens == 1.0
    assert outcome.groups["advantage/negative"].kept_tokens == 0.0
    assert outcome.groups["advantage/negative"].lr_scale == 0.0
    assert outcome.groups["advantage/negative"].ess == 0.0
    assert set(outcome.groups) == {"length/le16", "advantage/positive", "advantage/negative", "staleness/is0"}
    assert outcome.steps[1] == outcome.overall
    assert list(outcome.turns) == ["turn/is0"]


def test_the_base_loss_brings_its_own_ratio(tmp_path: Path) -> None:
    """pi / pi_old = 2 on the first token: its gradient weight is w 2 A, the uncorrected one 2 A."""
    log_prob = np.concatenate([np.asarray(row, dtype=np.float32) for row in OLD])
    log_prob[0] += LOG2
    rows = by_hand(OLD, MU, advantages=A, log_prob=log_prob)
    full = CorrectionSpec.from_mapping({"weight": TIS | {"ratio": "full", "upper": 100.0}})
    _, tis, gpg = replayed(tmp_path, rows, TOKEN_TIS, full).outcomes
    # Uncorrected 4 + 1 + 1 + 4 + 4 = 14; corrected (2 * 2)^2 + 1 + 1/4 + 16 + 16.
    assert tis.overall.lr_scale == pytest.approx(math.sqrt(49.25 / 14))
    # A weight on pi / mu stands next to a loss without a ratio: f = 8, 1, 1/2 | 2, 2, the reference itself.
    assert gpg.overall.lr_scale == pytest.approx(math.sqrt((64 + 1 + 0.25 + 32) / 14))
    assert gpg.overall.bias_token == pytest.approx(0, abs=1e-6)


def test_a_token_that_ppo_clips_has_no_gradient(tmp_path: Path) -> None:
    """The card says vanilla with a clip of 0.2: r = 2 at A > 0 has none, whatever weight it would get."""
    log_prob = np.concatenate([np.asarray(row, dtype=np.float32) for row in OLD])
    log_prob[0] += LOG2
    rows = by_hand(OLD, MU, advantages=A, log_prob=log_prob)
    actor = {"clip_ratio": 0.2, "policy_loss": {"loss_mode": "vanilla"}}
    (tmp_path / "run.json").write_text(json.dumps({"config": {"actor_rollout_ref": {"actor": actor}}}))
    result = replayed(tmp_path, rows, TOKEN_TIS)
    # Uncorrected 0 + 1 + 1 + 4 + 4 = 10; corrected 0 + 1 + 1/4 + 16 + 16.
    assert result.outcomes[1].overall.lr_scale == pytest.approx(math.sqrt(33.25 / 10))
    assert not any("base loss" in note.lower() for note in result.notes)


def test_bypass_is_the_ratio_to_mu(tmp_path: Path) -> None:
    """pi_old := mu, so that PPO's own ratio is pi / mu, the reference by token."""
    bypass = CorrectionSpec.from_mapping({"proximal": "bypass"})
    outcome = replayed(tmp_path, by_hand(OLD, MU, advantages=A), bypass).outcomes[1]
    assert outcome.overall.bias_token == pytest.approx(0, abs=1e-6)
    assert outcome.overall.lr_scale == pytest.approx(math.sqrt(49.25 / 11))


def test_two_rows_are_no_reference(tmp_path: Path) -> None:
    result = replayed(tmp_path, by_hand(OLD, MU, advantages=A), TOKEN_TIS)
    assert result.outcomes[1].overall.bias_sequence is None
    assert result.outcomes[1].overall.bias_sequence_systematic is None
    assert result.outcomes[1].overall.bias_token is not None
    assert any("2 rows count as only 1.8" in note for note in result.notes)


def test_a_token_that_is_not_finite_is_left_out_and_counted(tmp_path: Path) -> None:
    log_prob = np.concatenate([np.asarray(row, dtype=np.float32) for row in OLD])
    log_prob[1] = np.nan
    mu = np.concatenate([np.asarray(row, dtype=np.float32) for row in MU])
    mu[4] = -np.inf
    result = replayed(tmp_path, by_hand(OLD, MU, advantages=A, log_prob=log_prob, rollout_log_prob=mu), TOKEN_TIS)
    overall = result.outcomes[1].overall
    # Response tokens stay 5; mu of one is not finite, so that it is not valid and not kept.
    close(overall, tokens=5, kept_tokens=4 / 5)
    # A pi that is not finite is kept by the stages; its gradient weight is left out. f A = 2, -, 1/2 | -4, -.
    assert overall.lr_scale == pytest.approx(math.sqrt((4 + 0.25 + 16) / (1 + 1 + 4)))
    assert any(note.startswith("2 response tokens have") for note in result.notes)
    assert all(math.isfinite(value) for value in asdict(overall).values() if value is not None)


def test_nothing_to_measure_by(tmp_path: Path) -> None:
    rows = by_hand(
        OLD, MU, advantages=A, response_mask=np.zeros(5, dtype=bool), length=np.zeros(2, dtype=np.int32),
        turn=np.full(5, -1, dtype=np.int16),
    )  # fmt: skip
    overall = replayed(tmp_path, rows, TOKEN_TIS).outcomes[1].overall
    assert (overall.tokens, overall.rows) == (0, 0)
    measured = {overall.kept_tokens, overall.ess, overall.mismatch_left, overall.lr_scale, overall.bias_token}
    assert measured == {None}


def test_turns_and_staleness(tmp_path: Path) -> None:
    """Tokens of turns 0, 1, 1 | 2, 4; a mask by turn drops the first token alone, r = 4, and row 1's two of r = 2."""
    turns = np.array([0, 1, 1, 2, 4], dtype=np.int16)
    versions = np.array([0, -1])
    rows = by_hand(OLD, MU, advantages=A, turn=turns, oldest_version=versions, newest_version=versions)
    by_turn = spec(None, turn=band(0.5, 1.7, level="turn"))
    outcome: CorrectionOutcome = replayed(tmp_path, rows, by_turn).outcomes[1]
    kept = {name: (share.tokens, share.kept_tokens) for name, share in outcome.turns.items()}
    assert kept == {"turn/is0": (1, 0.0), "turn/is1": (2, 1.0), "turn/is2": (1, 0.0), "turn/ge3": (1, 0.0)}
    # Step 1 begins with version 0: row 0 is of staleness 0, that of row 1 is not known.
    assert outcome.groups["staleness/is0"].tokens == 3
    assert not {name for name in outcome.groups if name.startswith("staleness/")} - {"staleness/is0"}
