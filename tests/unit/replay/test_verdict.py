"""Verdicts on reports of updates, with hand-worked numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.replay.fsdp_engine import FirstLook, RoutingReport
from recipe.offpolicy.replay.routing_replay import judge, measure_routes, merge_reports

LOOK = FirstLook(checksums=2, tokens=10, k3=1e-4, k3_without=1e-2)
REPORT = RoutingReport(
    layers=(1, 2),
    top_k=2,
    tokens=20,
    replayed=(16, 16),
    entered=(16, 16),
    equal=(16, 8),
    ages=((20, 20), (12, 4), (0, 0), (0, 0)),
    withheld=2,
    size=160,
    gradients=(0.5, 0.25),
    first=LOOK,
)


def reports(**changes: Any) -> list[RoutingReport]:
    """Two ranks."""
    return [REPORT, replace(REPORT, **changes)]


def test_metrics_by_hand() -> None:
    assert measure_routes(reports()) == pytest.approx(
        {
            "replayed_token_share": 32 / 40,
            "withheld_token_share": 4 / 40,
            "equal_share": 48 / 64,
            "equal_share_worst_layer": 0.5,
            "bytes": 320,
            "is0/equal_share": 1.0,
            "is1/equal_share": 1 / 3,
            "is2/equal_share": math.nan,
            "ge3/equal_share": math.nan,
            "gate_gradient": 1.0,
            "kl_k3": 1e-5,
            "kl_k3_without": 1e-3,
        },
        nan_ok=True,
    )
    assert judge(reports(), "R3", tokens=40) == (
        "routing replay R3 LIVE in 2 layers: 80.0% of tokens replayed with the recorded ids, 75.0% of "
        "choices are the trainer's own, routes of 4 rows as sampled, KL(mu, pi) by k3 1.0e-05 with them and 1.0e-03 "
        "without."
    )
    assert merge_reports(reports()).gradients == (1.0, 0.5)


def test_an_update_without_a_gradient_proves_nothing() -> None:
    assert judge([replace(REPORT, gradients=(0.0, 0.0))], "R3", tokens=20) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": (0, 1)}, "ranks replay routes in different layers"),
        ({"tokens": 19}, "39 tokens were forwarded with routes, but the update has 40"),
        ({"replayed": (16, 15)}, r"the layers replayed different numbers of tokens, \{1: 32, 2: 31\}"),
        ({"gradients": (0.5, math.inf)}, r"gates of layer\(s\) \[2\] have gradients that are not finite"),
        ({"first": FirstLook(2, 10, 1e-1, 1e-2)}, "so mu was not sampled with these routes"),
    ],
    ids=str,
)
def test_what_is_wrong_stops_the_run(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LivenessError, match=words):
        judge(reports(**changes), "R3", tokens=40)


def test_a_gate_without_a_gradient_stops_the_run() -> None:
    silent = replace(REPORT, gradients=(0.5, 0.0))
    with pytest.raises(LivenessError, match=r"gates of layer\(s\) \[2\] have no gradient"):
        judge([silent], "R3", tokens=20)
    # One expert may weigh 1 whatever its score is.
    assert judge([replace(silent, top_k=1)], "R3", tokens=20)


def test_an_update_without_reports_or_routes_stops_the_run() -> None:
    with pytest.raises(LivenessError, match="returned no report"):
        judge([], "R3", tokens=20)
    with pytest.raises(LivenessError, match=r"\{1: 0, 2: 0\}"):
        judge([replace(REPORT, replayed=(0, 0), withheld=0)], "R3", tokens=20)
    # All rows too old is what offpolicy.replay.oldest means.
    old = [replace(REPORT, replayed=(0, 0))]
    assert judge(old, "R3", tokens=20)
    assert measure_routes(old)["replayed_token_share"] == 0


def test_k3_of_engines_that_agree_is_no_evidence() -> None:
    judge([replace(REPORT, first=FirstLook(2, 10, 5e-6, 1e-6))], "R3", tokens=20)
    # The trainer's own routes are not mu's.
    judge([replace(REPORT, first=FirstLook(2, 10, 1e-1, 1e-2))], "R2", tokens=20)
