"""From metrics to verdict, table and picture."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from recipe.offpolicy.analysis.table import to_rich
from scripts.quickstart.report import (
    ESS,
    FAILED,
    KEPT,
    NOT_LIVE,
    NOT_RISEN,
    OK,
    RATIO_ESS,
    REWARD,
    History,
    build_summary_table,
    describe,
    draw,
    judge,
    read_validation,
)

SCORE = "val-core/reasoning_gym/spell_backward/acc/mean@1"


def made_up(before: float | None, after: float | None, proved: float = 1.0, steps: int = 4) -> History:
    """A run whose reward rises by 0.1 a step from 0.3."""
    records: list[tuple[int, dict]] = [(0, {} if before is None else {SCORE: before})]
    for step in range(1, steps + 1):
        data = {
            "critic/rewards/mean": 0.2 + 0.1 * step,
            "offpolicy/kl/k3": 1e-4 * step,
            "offpolicy/weight/ess": 0.99,
            "offpolicy/keep/token_share": 0.9,
            "offpolicy/live/proved": proved,
            "timing_s/step": 2.5,
        }
        if step == steps and after is not None:
            data[SCORE] = after
        records.append((step, data))
    return History(records)


def print_table(history: History) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(to_rich(build_summary_table(history, corrected=True)))
    return console.export_text()


def test_the_heldout_score_is_the_mean_over_all_answers() -> None:
    data = {"val-aux/x/acc/mean@1": 0.1, "val-core/x/acc/best@4/mean": 0.9, "val-core/x/acc/mean@4": 0.25}
    assert read_validation(data) == (None, 0.25)
    assert read_validation({"critic/rewards/mean": 0.5}) == (None, None)


def test_the_share_of_exact_answers_stands_beside_the_score() -> None:
    data = {"val-core/x/acc/mean@1": 0.6, "val-aux/x/exact/mean@1": 0.25, "val-aux/x/exact/std@1": 0.1}
    assert read_validation(data) == (0.25, 0.6)
    history = made_up(0.3, 0.8)
    assert "exact match" not in history.heldout
    history.records[0][1]["val-aux/x/exact/mean@1"] = 0.117
    history.records[-1][1]["val-aux/x/exact/mean@1"] = 0.625
    text = print_table(history)
    assert "held-out exact match" in text
    assert "0.117" in text


def test_without_a_weight_the_effective_sample_size_is_the_ratios() -> None:
    """A policy far from its samples shows as 0.05 there, and as 1.0 in the weights of which there are none."""
    history = made_up(0.3, 0.8)
    assert history.ess == ESS
    for _, data in history.records[1:]:
        data |= {"offpolicy/weight/ess": 1.0, "offpolicy/rollout_ratio/ess": 0.05}
    assert history.ess == RATIO_ESS
    assert history.series(history.ess) == [0.05] * 4
    assert "effective sample size of pi_old/mu" in print_table(history)


@pytest.mark.parametrize(
    ("history", "corrected", "judged", "code"),
    [
        (made_up(0.3, 0.8), True, True, OK),
        (made_up(0.3, 0.4), True, True, OK),
        (made_up(0.3, 0.39), True, True, NOT_RISEN),
        (made_up(0.3, 0.1), True, False, OK),  # fewer steps, or another model: shown, not judged
        (made_up(0.3, 0.8, proved=0.0), True, True, NOT_LIVE),
        (made_up(0.3, 0.8, proved=0.0), True, False, NOT_LIVE),
        (made_up(0.3, 0.8, proved=0.0), False, True, OK),  # correction=none has nothing to prove
        (made_up(None, 0.8), True, True, FAILED),
        (made_up(0.3, None), True, True, FAILED),
        (History(), True, True, FAILED),
    ],
)
def test_verdicts(history, corrected, judged, code):
    assert judge(history, corrected=corrected, judged=judged)[0] == code


@pytest.mark.parametrize(
    ("history", "code"),
    [(made_up(None, None), OK), (made_up(None, None, proved=0.0), NOT_LIVE), (made_up(None, None, steps=0), FAILED)],
)
def test_without_validation_the_proof_is_all(history, code):
    assert judge(history, corrected=True, judged=True, scored=False)[0] == code


def test_the_sentence_names_what_was_measured_exact_match_first():
    history = made_up(0.3, 0.35)
    _, sentence = judge(history, corrected=True, judged=True)
    assert sentence == "held out, score from 0.300 to 0.350: the score must rise by 0.1"
    for (_, data), share in zip((history.records[0], history.records[-1]), (0.117, 0.625), strict=True):
        data["val-aux/x/exact/mean@1"] = share
    _, sentence = judge(history, corrected=True, judged=True)
    said = "held out, exact match from 0.117 to 0.625 and graded score from 0.300 to 0.350"
    assert sentence == f"{said}: the graded score must rise by 0.1"


def test_series_skip_the_validation_before_training_and_mark_gaps():
    history = made_up(0.3, 0.8)
    assert history.steps == [1, 2, 3, 4]
    assert history.series(REWARD) == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert history.heldout == {"score": [(0, 0.3), (4, 0.8)]}
    del history.records[2][1]["offpolicy/keep/token_share"]
    assert math.isnan(history.series(KEPT)[1])


def test_table_shows_first_and_last():
    text = print_table(made_up(0.312, 0.845))
    for shown in ("0.312", "0.845", "0.300", "0.600", "1.00e-04", "4.00e-04", "0.990", "0.900", "yes"):
        assert shown in text


@pytest.mark.slow
def test_picture_is_drawn_also_where_metrics_are_missing(tmp_path):
    for name, history in (("whole", made_up(0.3, 0.8)), ("bare", History([(1, {"critic/rewards/mean": 0.2})]))):
        path = tmp_path / f"{name}.png"
        draw(history, path, "made up")
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 10_000


def test_the_correction_in_words():
    assert describe({"weight": None, "masks": {}}) == "uncorrected"
    assert describe({"weight": None, "masks": {"gsm": {}}}) == "mask gsm"
    both = {"weight": {"level": "token", "kind": "truncate"}, "masks": {"gsm": {}, "opsm": {}}}
    assert describe(both) == "token weights (truncate), masks gsm and opsm"
    signed = {"weights": {"a": {"level": "sequence", "when": "negative"}}, "penalty": {"coefficient": 0.1}}
    assert describe(signed) == "sequence weights of negative advantage, a penalty on the log-ratio"
    assert describe({"kl_weight": {"ratio": "ppo"}}) == "weighed KL"
