"""What a report says of the engines where the run took mu, or a mixture of mu and pi, for pi_old."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy.analysis.report.timeline import build_timeline
from recipe.offpolicy.analysis.report.verdict import Answer, build_answers, run_studies
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording, Rows, concatenate
from recipe.offpolicy.report import main
from tests.support.recordings import drawn_rows
from tests.support.unscored import EVERY, MADE_OF_MU, recorded_under

LENGTHS = [20] * 64


def later() -> Rows:
    """Of the second gradient step, at which pi has moved by 0.5 nats per token."""
    rows = drawn_rows(LENGTHS, seed=1, backend=0.1, drift=0.5)
    return replace(rows, mini_batch=np.ones(64, dtype=np.int32))


def said(recording: Recording, proximal: str) -> tuple[Answer, Answer]:
    """On whether the engines agree, and on where the mismatch comes from."""
    spec = CorrectionSpec.from_mapping(EVERY[proximal])
    found = build_answers(build_timeline(recording), spec, {}, run_studies(recording, spec))
    by_question = {answer.question: answer for answer in found}
    return by_question["Do the engines agree?"], by_question["Where does the mismatch come from?"]


@pytest.mark.parametrize("proximal", [*MADE_OF_MU, "reuse"])
def test_engines_are_judged_by_the_trainers_own_weights(proximal: str, tmp_path: Path) -> None:
    """Noise of 0.1 nats is a KL of 0.1^2 / 2 nats per token, whatever the correction takes for pi_old."""
    engines, origin = said(recorded_under(proximal, tmp_path / "run", drawn_rows(LENGTHS, backend=0.1)), proximal)
    assert engines.answer == "KL(mu, pi_old) 0.0051 nats per token"
    assert "Backend 100%, staleness 0%, drift 0% of KL(mu, pi)." in origin.because


@pytest.mark.slow
@pytest.mark.parametrize("proximal", MADE_OF_MU)
def test_rows_of_later_gradient_steps_are_left_out(proximal: str, tmp_path: Path) -> None:
    rows = drawn_rows(LENGTHS, backend=0.1)
    recording = recorded_under(proximal, tmp_path / "run", concatenate([rows, later()]))
    engines, origin = said(recording, proximal)
    assert engines.answer == "KL(mu, pi_old) 0.0051 nats per token"
    assert "Mean over 1,280 response tokens" in engines.because
    assert "64 rows of later gradient steps are left out" in engines.because
    assert "Backend 100%, staleness 0% of KL(mu, pi_old)." in origin.because
    assert "drift is not identified" in origin.because


@pytest.mark.parametrize("proximal", MADE_OF_MU)
def test_without_a_first_gradient_step_the_answer_is_unknown(proximal: str, tmp_path: Path) -> None:
    recording = recorded_under(proximal, tmp_path / "run", later())
    for answer in said(recording, proximal):
        assert answer.answer == "unknown"
        assert "none during the first gradient step" in answer.because
        assert "Record with correction.proximal=recompute" in answer.because


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_page_without_a_drift(tmp_path: Path) -> None:
    rows = concatenate([drawn_rows(LENGTHS, backend=0.1), later()])
    recording = recorded_under("bypass", tmp_path / "run", rows)
    (step,) = build_timeline(recording).steps
    assert (step.unscored, step.compared) == (64, 1280)
    assert math.isnan(step.drift)
    assert main([str(recording.directory), "--out", str(tmp_path / "a.html")]) == 0
    assert "drift is not identified" in (tmp_path / "a.html").read_text()


def test_drift_is_recorded_beside_a_known_pi_old(tmp_path: Path) -> None:
    (step,) = build_timeline(recorded_under("recompute", tmp_path / "run", later())).steps
    # The mean of |x| of a normal x is sqrt(2 / pi) of its deviation.
    assert step.drift == pytest.approx(0.5 * math.sqrt(2 / math.pi), rel=0.1)
    assert step.unscored == 0
