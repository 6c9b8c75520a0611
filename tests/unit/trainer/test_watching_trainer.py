"""The trainer that looks at Megatron's routers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")


def config(mode: str = "R3", use_v1: bool = True) -> DictConfig:
    actor = {"strategy": "megatron", "megatron": {"router_replay": {"mode": mode}}}
    trainer = {"use_v1": use_v1, "v1": {"trainer_mode": "sync"}}
    return OmegaConf.create({"actor_rollout_ref": {"actor": actor}, "trainer": trainer, "offpolicy": {}})


@pytest.mark.parametrize(
    ("made", "watches"), [(config(), True), (config("disabled"), False), (config(use_v1=False), False)], ids=str
)
def test_it_watches_where_megatron_replays(made: DictConfig, watches: bool) -> None:
    from recipe.offpolicy.trainer.mixin_choice import choose_v1
    from recipe.offpolicy.trainer.watching_trainer import WatchingTrainer

    assert issubclass(choose_v1(made), WatchingTrainer) is watches


def test_actors_get_workers_that_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.utils import Role

    from recipe.offpolicy.trainer import watching_trainer
    from recipe.offpolicy.trainer.trainer_v1 import OffPolicyTrainer

    worker = SimpleNamespace(__ray_actor_class__=dict)
    mapping = {Role.ActorRollout: worker, Role.RefPolicy: worker}

    def init(self: Any) -> None:
        self.role_worker_mapping = mapping

    monkeypatch.setattr(OffPolicyTrainer, "_init_resource_pool_mgr", init, raising=False)
    monkeypatch.setattr(watching_trainer.ray, "remote", lambda kind: kind)
    monkeypatch.setattr(watching_trainer, "build_watched", lambda kind, mode: (kind, mode))
    trainer: Any = object.__new__(watching_trainer.WatchingTrainer)
    trainer.config = config()
    trainer._init_resource_pool_mgr()
    assert mapping == {Role.ActorRollout: (dict, "R3"), Role.RefPolicy: worker}


def test_each_update_is_judged_and_the_first_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from recipe.offpolicy.proof.verify import LivenessError
    from recipe.offpolicy.replay.megatron_report import REPORT, MegatronReport
    from recipe.offpolicy.trainer.trainer_v1 import OffPolicyTrainer
    from recipe.offpolicy.trainer.watching_trainer import WatchingTrainer

    monkeypatch.setattr(OffPolicyTrainer, "_update_and_collect", lambda self, update, batch: update(batch))
    caplog.set_level(logging.INFO, logger="verl.offpolicy")
    trainer: Any = object.__new__(WatchingTrainer)
    trainer.config = config()
    report = MegatronReport(layers=(0,), tokens=9, forwarded=10, placed=True)
    for _ in range(2):
        output = trainer._update_and_collect(lambda batch: {"metrics": {REPORT: [[report]], "loss": 1.0}}, None)
        assert output == {"metrics": {"loss": 1.0}}
    assert caplog.text.count("routing replay R3 LIVE on Megatron") == 1
    with pytest.raises(LivenessError):
        trainer._update_and_collect(lambda batch: {"metrics": {}}, None)
