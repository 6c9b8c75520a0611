"""What verl's workers receive: the loss, and the method by which a trainer acts in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipe.offpolicy.worker.loss import build_loss
from tests.support.applications import NEEDED, application
from tests.support.corrections import GSM, TIS, spec

pytest.importorskip("verl.workers.engine_workers")


def test_worker_groups_find_it_and_it_calls_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.worker.verl_workers import add_method, install_offpolicy
    from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
    from verl.workers.engine_workers import ActorRolloutRefWorker

    monkeypatch.setattr(ActorRolloutRefWorker, "install_offpolicy", None, raising=False)
    add_method(ActorRolloutRefWorker)

    class Own(ActorRolloutRefWorker):  # type: ignore[misc]
        """A fork's."""

    found: Any = Own.install_offpolicy
    assert getattr(found, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL
    called: list[Any] = []
    install_offpolicy("worker", [called.append, lambda worker: called.append(worker * 2)])
    assert called == ["worker", "workerworker"]


@pytest.mark.verl(">=0.9")
def test_it_is_built_of_the_actors_configuration_and_the_recording(tmp_path: Path) -> None:
    recorded = f"offpolicy.record.dir={tmp_path / 'recording'}"
    with application("actor_rollout_ref.actor.clip_ratio=0.3", recorded, *NEEDED) as config:
        loss = build_loss(config, spec(TIS), {"gsm": spec(gsm=GSM)})
    assert (loss.spec, dict(loss.shadows), loss.prove) == (spec(TIS), {"gsm": spec(gsm=GSM)}, False)
    (actor_config,) = loss.verl_loss.args
    assert actor_config.clip_ratio == 0.3
    assert loss.record is not None
    assert Path(loss.record.dir) == tmp_path / "recording"
