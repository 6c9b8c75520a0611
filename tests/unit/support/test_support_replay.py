"""What a run that replays supports tells servers, workers and logger."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

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


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_agent_loops_get_the_client_that_notes(version: str, add_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.extensions.add_ons import AddOns
    from recipe.offpolicy.trainer.corrected_v0 import CorrectedV0
    from recipe.offpolicy.trainer.corrected_v1 import CorrectedV1
    from verl.workers.rollout.llm_server import LLMServerManager

    monkeypatch.setattr(LLMServerManager, "get_client", lambda self, client_cls=None, **kwargs: "verl's client_cls")

    class Trainer:
        config = OmegaConf.create({"trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}}})

        def __init__(self) -> None:
            self.role_worker_mapping: dict[Any, Any] = {}
            self.client: Any = None

        def init_workers(self) -> None:
            self.client = self.get_llm_client()

        def get_llm_client(self) -> Any:
            return object.__new__(LLMServerManager).get_client()

    trainer = Trainer()
    run: Any = {"v0": CorrectedV0, "v1": CorrectedV1}[version](trainer)
    run.add_ons, run._begun = AddOns(own=[add_on]), True
    if version == "v0":
        run._adopt_workers = lambda: None
        trainer.init_workers()
        assert trainer.client == "noting verl's client_cls"
    else:
        assert trainer.get_llm_client() == "noting verl's client_cls"


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
