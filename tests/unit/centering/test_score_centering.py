"""The add-on of score centering: what it does with the workers' reports."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.offpolicy.centering.score_centering import CenteringReport
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.support.support_settings import SupportSettings

pytestmark = pytest.mark.verl("==0.9.1")
REPORT = CenteringReport(tokens=100, members=2000, compared=8, checked=99, bytes=12_100, mass=98.0)


def add_on() -> Any:
    from recipe.offpolicy.centering.score_centering import ScoreCentering

    return ScoreCentering(SupportSettings(20, "full", likeliest=True))


def test_reports_of_ranks_and_mini_batches_are_summed() -> None:
    centering = add_on()
    metrics: dict[str, Any] = {"offpolicy_centering_report": [[REPORT], [replace(REPORT, checked=97, mass=90.0)]]}
    centering.on_update(metrics, None)
    assert metrics == {}
    assert centering.metrics() == pytest.approx(
        {
            "offpolicy/centering/head_mass": 0.94,
            "offpolicy/centering/sampled_share": 0.98,
            "offpolicy/centering/bytes": 24_200.0,
            "offpolicy/centering/bytes_a_token": 121.0,
        }
    )


def test_an_update_without_a_report_stops_the_run_and_one_without_tokens_does_not() -> None:
    centering = add_on()
    with pytest.raises(LivenessError, match="returned no report"):
        centering.on_update({}, None)
    empty = CenteringReport(0, 0, 0, 0, 0, 0.0)
    centering.on_update({"offpolicy_centering_report": [empty]}, None)
    assert math.isnan(centering.metrics()["offpolicy/centering/head_mass"])


def test_a_client_that_is_not_verls_is_refused_by_the_key_that_needs_it() -> None:
    from recipe.offpolicy.support.token_supports import SupportError

    with pytest.raises(SupportError, match=r"or set correction\.centering=null"):
        add_on().rollout_client(SimpleNamespace())
