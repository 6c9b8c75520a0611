"""Tables and words of a calibration."""

from __future__ import annotations

import json
import math

import pytest

from recipe.offpolicy.analysis.calibration.calibration_page import (
    JointShares,
    build_json,
    format_bucket,
)
from recipe.offpolicy.analysis.calibration.propose import CalibrationRequest, CalibrationResult, propose_bounds
from recipe.offpolicy.recording import Step
from tests.support.corrections import GSM, TIS, spec
from tests.support.recordings import drawn_rows

BOTH = spec(TIS, gsm=GSM)
THEN = JointShares(tokens=0.9, rows=0.8, ess=math.nan)


def recorded() -> Step:
    return Step(drawn_rows([20, 30] * 40, backend=0.05), BOTH.to_mapping(), ())


@pytest.fixture(scope="module")
def result() -> CalibrationResult:
    return propose_bounds([recorded()], BOTH, CalibrationRequest(target_kept=0.9))


def test_the_document_has_none_for_what_is_missing(result: CalibrationResult) -> None:
    found = json.loads(json.dumps(build_json(result, None, THEN), allow_nan=False))
    assert found["together"] == {"now": None, "then": {"tokens": 0.9, "rows": 0.8, "ess": None}}
    assert [each["key"] for each in found["proposals"]] == ["correction.masks.gsm"]


def test_buckets_by_length() -> None:
    assert format_bucket("le64") == "17 to 64"
    assert format_bucket("le16") == "1 to 16"
    assert format_bucket("gt4096") == "over 4096"
