"""The look at Megatron's routers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")


def test_actors_get_workers_that_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.replay import megatron_engine

    monkeypatch.setattr(megatron_engine, "watch_actor", lambda worker, mode: (worker, mode))
    assert megatron_engine.MegatronReplay("R3").engine_part()("worker") == ("worker", "R3")


def test_each_update_is_judged_and_the_first_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from recipe.offpolicy.proof.verify import LivenessError
    from recipe.offpolicy.replay.megatron_engine import REPORT, MegatronReplay, MegatronReport

    caplog.set_level(logging.INFO, logger="verl.offpolicy")
    add_on = MegatronReplay("R3")
    report = MegatronReport(layers=(0,), tokens=9, forwarded=10, placed=True)
    for _ in range(2):
        metrics: dict[str, Any] = {REPORT: [[report]], "loss": 1.0}
        add_on.on_update(metrics, None)
        assert metrics == {"loss": 1.0}
    assert caplog.text.count("routing replay R3 LIVE on Megatron") == 1
    with pytest.raises(LivenessError):
        add_on.on_update({}, None)
