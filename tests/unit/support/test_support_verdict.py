"""Settings of the support, and the trainer's verdict on the workers' reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.batch.plan import take_reports
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.support.fsdp_engine import REPORT as KEY
from recipe.offpolicy.support.fsdp_engine import SupportReport
from recipe.offpolicy.support.support_replay import judge
from recipe.offpolicy.support.support_settings import SupportSettings, choose_size

SETTINGS = SupportSettings(32, "mask")
REPORT = SupportReport(
    tokens=100,
    known=80,
    members=240,
    largest=12,
    compared=8,
    bytes=700,
    least_mass=0.9999,
    greatest_mass=1.0,
    unknown_mass=14.0,
    k3_tokens=40,
    k3=0.008,
    k3_without=0.8,
)


def test_reports_of_ranks_and_mini_batches_are_summed() -> None:
    metrics: dict[str, Any] = {
        "key": [
            [REPORT],
            [replace(REPORT, tokens=100, known=100, unknown_mass=0.0, largest=20, k3_tokens=0, k3=0.0, k3_without=0.0)],
        ]
    }
    found, proof = judge(take_reports(metrics, "key"), SETTINGS, first=True)
    assert metrics == {}
    assert found == pytest.approx(
        {
            "unknown_token_share": 20 / 200,
            "size": 480 / 180,
            "size_largest": 20.0,
            "mass_least": 0.9999,
            "unknown_mass": 14 / 20,
            "bytes": 1400.0,
            "bytes_a_token": 7.0,
            "kl_k3": 0.008 / 40,
            "kl_k3_without": 0.8 / 40,
        }
    )
    assert proof.startswith("support of 90.0% of tokens LIVE, 2.7 ids per token")


def test_no_known_support_at_all_stops_the_run() -> None:
    with pytest.raises(LivenessError, match=r"none of 100 tokens has a support of at most 32 ids.*raise"):
        judge([replace(REPORT, known=0, members=0)], SETTINGS, first=False)


@pytest.mark.verl("==0.9.1")
def test_each_update_is_judged_and_the_first_is_proved() -> None:
    pytest.importorskip("transfer_queue")
    from recipe.offpolicy.support.support_replay import SupportReplay

    add_on = SupportReplay(SETTINGS)
    report = replace(REPORT, k3=0.9)
    with pytest.raises(LivenessError, match="mu was not sampled from this support"):
        add_on.on_update({KEY: [report]}, None)
    add_on._proved = True
    metrics: dict[str, Any] = {KEY: [report]}
    add_on.on_update(metrics, None)
    assert metrics == {}
    assert add_on.metrics()["offpolicy/support/size"] == 3.0
    with pytest.raises(LivenessError, match="returned no report"):
        add_on.on_update({}, None)


def read(rollout: dict[str, Any], **correction: Any) -> SupportSettings | None:
    return SupportSettings.from_config(
        OmegaConf.create({"correction": correction, "actor_rollout_ref": {"rollout": rollout}})
    )


@pytest.mark.parametrize(("top_k", "size"), [(5, 9), (-1, 32), (0, 32), (None, 32)])
def test_the_number_of_ids_goes_by_top_k(top_k: int | None, size: int) -> None:
    assert choose_size(top_k) == size
    assert read({"top_k": top_k}, support="engine") == SupportSettings(size, "mask", None)


def test_what_is_set_is_taken() -> None:
    found = read({"top_k": 5}, support="engine", support_size=20, support_unknown="full", support_min_p=0.1)
    assert found == SupportSettings(20, "full", 0.1)
