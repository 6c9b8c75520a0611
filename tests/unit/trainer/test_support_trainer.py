"""Which trainers replay the support, and what they tell servers, workers and logger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")

KINDS = ("SupportTrainerV1", "SupportTrainerV0", "BoundedTrainer", "OffPolicyTrainer", "OffPolicyRayTrainer")


def config(support: str | None = "engine", **changes: Any) -> DictConfig:
    made = OmegaConf.create(
        {
            "correction": {"support": support, "support_unknown": "mask", "support_size": 8},
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}, "rollout": {"top_p": 0.9}},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "offpolicy": {"staleness": {"eta": None}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(made, key, value, force_add=True)
    return made


@pytest.mark.parametrize(
    ("version", "made", "names"),
    [
        ("v1", config(None), ["OffPolicyTrainer"]),
        ("v1", config(), ["SupportTrainerV1", "OffPolicyTrainer"]),
        ("v1", config(**{"offpolicy.staleness.eta": 1}), ["SupportTrainerV1", "BoundedTrainer", "OffPolicyTrainer"]),
        ("v0", config(None), ["OffPolicyRayTrainer"]),
        ("v0", config(), ["SupportTrainerV0", "OffPolicyRayTrainer"]),
    ],
)
def test_a_trainer_replays_where_the_key_is_set(version: str, made: DictConfig, names: list[str]) -> None:
    from recipe.offpolicy.trainer.mixin_choice import choose_v0, choose_v1

    choose: Any = {"v0": choose_v0, "v1": choose_v1}[version]
    order = [kind.__name__ for kind in choose(made).__mro__]
    assert [name for name in order if name in KINDS] == names


class V1:
    """What stands behind the mixin, on V1."""

    role_worker_mapping: Any = None

    def _init_resource_pool_mgr(self) -> None:
        pass

    def get_llm_client(self) -> str:
        return "client"

    def look(self, batch: Any, other: Any) -> Any:
        self.seen.append(dict(batch.extra_info))  # type: ignore[attr-defined]
        return batch

    _compute_old_log_prob = _update_actor = _compute_log_probs = look

    def _update_and_collect(self, update: Any, batch: Any) -> Any:
        return update(batch)


class V0:
    """And on V0."""

    def init_workers(self) -> None:
        self.llm_server_manager = SimpleNamespace(get_client=lambda: "client")

    def look(self, batch: Any, *other: Any) -> Any:
        self.seen.append(dict(batch.meta_info))  # type: ignore[attr-defined]
        return SimpleNamespace(meta_info={"metrics": {}})

    _compute_old_log_prob = _update_actor = _compute_log_probs = look


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    from recipe.offpolicy.trainer import support_trainer

    served: list[Any] = []
    monkeypatch.setattr(support_trainer, "serve_supports", served.append)
    monkeypatch.setattr(support_trainer, "note_supports", lambda client: f"noting {client}")
    monkeypatch.setattr(support_trainer.ray, "remote", lambda kind: kind)
    monkeypatch.setattr(support_trainer, "build_supporting", lambda kind, settings: (kind, settings))
    return SimpleNamespace(module=support_trainer, served=served)


def build(module: Any, version: str) -> Any:
    from verl.trainer.ppo.utils import Role

    mixin, behind = {
        "v1": (module.module.SupportTrainerV1, V1),
        "v0": (module.module.SupportTrainerV0, V0),
    }[version]
    trainer: Any = object.__new__(type("Trainer", (mixin, behind), {}))
    trainer.config, trainer.seen = config(), []
    worker = SimpleNamespace(__ray_actor_class__=dict)
    trainer.role_worker_mapping = {Role.ActorRollout: worker, Role.RefPolicy: worker}
    return trainer


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_actors_servers_and_client_are_ours_and_the_reference_is_verls(module: Any, version: str) -> None:
    from verl.trainer.ppo.utils import Role

    from recipe.offpolicy.support.support_settings import SupportSettings

    trainer = build(module, version)
    reference = trainer.role_worker_mapping[Role.RefPolicy]
    if version == "v1":
        trainer._init_resource_pool_mgr()
        assert trainer.get_llm_client() == "noting client"
    else:
        trainer.init_workers()
        assert trainer.llm_server_manager.get_client() == "noting client"
    settings = SupportSettings(8, "mask")
    assert module.served == [settings]
    assert trainer.role_worker_mapping == {Role.ActorRollout: (dict, settings), Role.RefPolicy: reference}


def test_the_flag_travels_with_the_batch_and_not_with_rows_of_an_extension(module: Any) -> None:
    flag = module.module.FLAG
    trainer = build(module, "v1")
    trainer._support_metrics = {"size": 2.0}
    batch, metrics = SimpleNamespace(extra_info={}), dict[str, float]()
    trainer._compute_old_log_prob(batch, metrics)
    trainer._compute_log_probs(batch, [])
    trainer._update_actor(batch, metrics)
    assert trainer.seen == [{flag: True}, {}, {flag: True}]
    assert metrics == {"offpolicy/support/size": 2.0}
    trainer = build(module, "v0")
    trainer._support_metrics = {"size": 2.0}
    batch = SimpleNamespace(meta_info={})
    trainer._compute_old_log_prob(batch)
    trainer._compute_log_probs(batch, [])
    output = trainer._update_actor(batch)
    assert trainer.seen == [{flag: True}, {}, {flag: True}]
    assert output.meta_info["metrics"] == {"offpolicy/support/size": 2.0}


def test_each_update_is_judged_and_the_first_is_proved(module: Any) -> None:
    from recipe.offpolicy.proof.verify import LivenessError
    from recipe.offpolicy.support.support_tally import SupportReport

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
    trainer = build(module, "v1")
    with pytest.raises(LivenessError, match="not the support that mu was sampled from"):
        trainer._update_and_collect(lambda batch: {"metrics": {module.module.REPORT: [report]}}, None)
    trainer._support_proved = True
    metrics: dict[str, Any] = {module.module.REPORT: [report]}
    trainer._update_and_collect(lambda batch: {"metrics": metrics}, None)
    assert metrics == {}
    assert trainer._support_metrics["size"] == 2.0
    with pytest.raises(LivenessError, match="without a report"):
        trainer._update_and_collect(lambda batch: {"metrics": {}}, None)
