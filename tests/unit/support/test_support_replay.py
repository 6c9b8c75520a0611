"""What a run that replays supports tells servers, workers and logger."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")


@pytest.fixture
def add_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    from recipe.offpolicy.support import support_replay
    from recipe.offpolicy.support.support_settings import SupportSettings

    made: Any = support_replay.SupportReplay(SupportSettings(8, "mask"))
    made.served = []
    monkeypatch.setattr(support_replay, "note_supports", lambda client: f"noting {client}")
    monkeypatch.setattr(support_replay, "serve_supports", made.served.append)
    return made


def test_each_update_is_judged_and_the_first_is_proved(add_on: Any) -> None:
    from recipe.offpolicy.proof.verify import LivenessError
    from recipe.offpolicy.support.fsdp_engine import REPORT, SupportReport

    report = SupportReport(
        tokens=10,
        known=10,
        members=20,
        largest=4,
        compared=2,
        bytes=30,
        least_mass=1.0,
        greatest_mass=1.0,
        unknown_mass=0.0,
        k3_tokens=10,
        k3=0.5,
        k3_without=0.1,
    )
    with pytest.raises(LivenessError, match="mu was not sampled from this support"):
        add_on.on_update({REPORT: [report]}, None)
    add_on._proved = True
    metrics: dict[str, Any] = {REPORT: [report]}
    add_on.on_update(metrics, None)
    assert metrics == {}
    assert add_on.metrics()["offpolicy/support/size"] == 2.0
    with pytest.raises(LivenessError, match="returned no report"):
        add_on.on_update({}, None)
