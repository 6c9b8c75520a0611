"""From metrics to verdict, table and picture."""

from __future__ import annotations

import json
import math
import sys

import pytest
from rich.console import Console

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "quickstart"))

from judge import Exit, judge
from metrics import KEPT, REWARD, History, MetricsFile
from report import describe, draw, exponent, number, smooth, summary_table

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


@pytest.mark.parametrize(
    ("history", "corrected", "judged", "code"),
    [
        (made_up(0.3, 0.8), True, True, Exit.OK),
        (made_up(0.3, 0.4), True, True, Exit.OK),
        (made_up(0.3, 0.39), True, True, Exit.NOT_RISEN),
        (made_up(0.3, 0.1), True, False, Exit.OK),  # fewer steps, or another model: shown, not judged
        (made_up(0.3, 0.8, proved=0.0), True, True, Exit.NOT_LIVE),
        (made_up(0.3, 0.8, proved=0.0), True, False, Exit.NOT_LIVE),
        (made_up(0.3, 0.8, proved=0.0), False, True, Exit.OK),  # correction=none has nothing to prove
        (made_up(None, 0.8), True, True, Exit.FAILED),
        (made_up(0.3, None), True, True, Exit.FAILED),
        (History(), True, True, Exit.FAILED),
    ],
)
def test_verdicts(history, corrected, judged, code):
    assert judge(history, corrected=corrected, judged=judged).code == code


@pytest.mark.parametrize(
    ("history", "code"),
    [
        (made_up(None, None), Exit.OK),
        (made_up(None, None, proved=0.0), Exit.NOT_LIVE),
        (made_up(None, None, steps=0), Exit.FAILED),
    ],
)
def test_without_validation_the_proof_is_all(history, code):
    assert judge(history, corrected=True, judged=True, scored=False).code == code


def test_the_sentence_names_both_scores():
    verdict = judge(made_up(0.3, 0.35), corrected=True, judged=True)
    assert "0.300" in verdict.sentence
    assert "0.350" in verdict.sentence


def test_series_skip_the_validation_before_training_and_mark_gaps():
    history = made_up(0.3, 0.8)
    assert history.steps == [1, 2, 3, 4]
    assert history.series(REWARD) == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert history.heldout == [(0, 0.3), (4, 0.8)]
    del history.records[2][1]["offpolicy/keep/token_share"]
    assert math.isnan(history.series(KEPT)[1])


def test_metrics_file_waits_for_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = MetricsFile(path)
    assert reader.read_new() == []
    first, second = (json.dumps({"step": step, "data": {"a": step}}) for step in (0, 1))
    path.write_text(f"{first}\n{second[:7]}")
    assert reader.read_new() == [(0, {"a": 0})]
    path.write_text(f"{first}\n{second}\n")
    assert reader.read_new() == [(1, {"a": 1})]
    assert reader.read_new() == []


def test_table_shows_first_and_last():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(made_up(0.312, 0.845), corrected=True))
    text = console.export_text()
    for shown in ("0.312", "0.845", "0.300", "0.600", "1.0e-04", "4.0e-04", "0.990", "0.900", "yes"):
        assert shown in text


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


def test_numbers():
    assert number(0.12345) == "0.123"
    assert number(0.00012345) == "1.2e-04"
    assert number(0.0) == "0.000"
    assert number(math.nan) == "-"
    assert exponent([2.3e-4, math.nan, 9e-5]) == -4
    assert exponent([0.5]) == 0
    assert exponent([0.0, math.nan]) == 0
    # (1), (1 + 3) / 2, (1 + 3 + 5) / 3, then NaN is left out: (3 + 5) / 2
    assert smooth([1.0, 3.0, 5.0, math.nan], width=3) == [1.0, 2.0, 3.0, 4.0]
