"""Tables and words of a calibration."""

from __future__ import annotations

import json
import math

import pytest

from recipe.offpolicy.analysis.calibration.calibration_tables import (
    build_joint_table,
    build_json,
    build_length_table,
    build_length_tables,
    build_overview_table,
    format_bucket,
    list_overrides,
)
from recipe.offpolicy.analysis.calibration.joint import JointShares
from recipe.offpolicy.analysis.calibration.kept_bounds import build_not_found
from recipe.offpolicy.analysis.calibration.propose import CalibrationRequest, CalibrationResult, propose_bounds
from recipe.offpolicy.analysis.calibration.scores import compute_scores
from recipe.offpolicy.recording import Step
from tests.support.corrections import GSM, TIS, spec
from tests.support.recordings import drawn_rows

BOTH = spec(TIS, gsm=GSM)
THEN = JointShares(tokens=0.9, rows=0.8, ess=math.nan)


def recorded() -> Step:
    return Step(drawn_rows([20, 30] * 40, backend=0.05), BOTH.to_mapping(), ())


@pytest.fixture(scope="module")
def result() -> CalibrationResult:
    request = CalibrationRequest(target_kept=0.9, of="masks.gsm", by_length=True)
    return propose_bounds([recorded()], BOTH, request)


def test_a_line_for_each_bound(result: CalibrationResult) -> None:
    table = build_overview_table(result, 0.95)
    ((bound, of, target, now, *_),) = table.rows
    assert (bound, of, target, now) == ("masks.gsm", "kept of rows", 0.9, "[0.99, 1.01]")
    assert "95% interval" in [column.name for column in table.columns]


def test_a_line_for_each_length(result: CalibrationResult) -> None:
    (proposal,) = result.proposals
    assert [(row[0], row[1]) for row in build_length_table(proposal, 0.95).rows] == [("17 to 64", 80)]
    assert build_length_tables(result, 0.95) == [build_length_table(proposal, 0.95)]


def test_all_of_it_before_and_after() -> None:
    rows = build_joint_table(None, THEN).rows
    assert [(row[1], row[2]) for row in rows[:2]] == [(None, 0.9), (None, 0.8)]


@pytest.mark.slow
def test_the_overrides_set_the_bounds_that_were_found(result: CalibrationResult) -> None:
    (proposal,) = result.proposals
    assert proposal.found
    upper = proposal.threshold.values["upper"]
    assert f"correction.masks.gsm.upper={upper!r}" in " ".join(list_overrides(result))


def test_the_document_has_none_for_what_is_missing(result: CalibrationResult) -> None:
    found = json.loads(json.dumps(build_json(result, None, THEN, 0.95), allow_nan=False))
    assert found["together"] == {"now": None, "then": {"tokens": 0.9, "rows": 0.8, "ess": None}}
    assert [each["key"] for each in found["proposals"]] == ["correction.masks.gsm"]


def test_a_bound_that_was_not_found_has_a_reason(result: CalibrationResult) -> None:
    scores, _ = compute_scores([recorded()], BOTH, [result.proposals[0].part])
    found = build_not_found(scores["masks.gsm"], "no row is long enough")
    assert (found.values, found.note, found.count, found.outcome) == ({}, "no row is long enough", 80, "not identified")


def test_buckets_by_length() -> None:
    assert format_bucket("le64") == "17 to 64"
    assert format_bucket("le16") == "1 to 16"
    assert format_bucket("gt4096") == "over 4096"
