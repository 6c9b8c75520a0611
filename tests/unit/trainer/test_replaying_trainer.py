"""Which trainer replays routes, and what it tells workers and logger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")

KINDS = ("ReplayingTrainer", "SnapshotTrainer", "BoundedTrainer", "OffPolicyTrainer")
MODE = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"


def config(mode: str, **changes: Any) -> DictConfig:
    made = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2", "ppo_epochs": 2}},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "offpolicy": {"replay": {"oldest": None}, "staleness": {"eta": None}},
        }
    )
    for key, value in {MODE: mode, **changes}.items():
        OmegaConf.update(made, key, value, force_add=True)
    return made


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (config("disabled"), ["OffPolicyTrainer"]),
        (config("R2"), ["ReplayingTrainer", "OffPolicyTrainer"]),
        (config("R3", **{"trainer.use_v1": False}), ["OffPolicyTrainer"]),
        (config("R3", **{"offpolicy.staleness.eta": 1}), ["ReplayingTrainer", "BoundedTrainer", "OffPolicyTrainer"]),
        (
            config("R3", **{"offpolicy.late_weights.snapshots": 2}),
            ["ReplayingTrainer", "SnapshotTrainer", "OffPolicyTrainer"],
        ),
    ],
    ids=str,
)
def test_a_trainer_replays_where_the_key_is_live(made: DictConfig, names: list[str]) -> None:
    from recipe.offpolicy.trainer.mixin_choice import choose_v1

    order = [kind.__name__ for kind in choose_v1(made).__mro__]
    assert [name for name in order if name in KINDS] == names


def test_actors_get_workers_that_replay_and_the_reference_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.utils import Role

    from recipe.offpolicy.replay.replay_settings import ReplaySettings
    from recipe.offpolicy.trainer import replaying_trainer
    from recipe.offpolicy.trainer.trainer_v1 import OffPolicyTrainer

    worker = SimpleNamespace(__ray_actor_class__=dict)
    mapping = {Role.Actor: worker, Role.RefPolicy: worker}

    def init(self: Any) -> None:
        self.role_worker_mapping = mapping

    monkeypatch.setattr(OffPolicyTrainer, "_init_resource_pool_mgr", init, raising=False)
    monkeypatch.setattr(replaying_trainer.ray, "remote", lambda kind: kind)
    monkeypatch.setattr(replaying_trainer, "build_replaying", lambda kind, settings: (kind, settings))
    trainer: Any = object.__new__(replaying_trainer.ReplayingTrainer)
    trainer.config = config("R3")
    trainer._init_resource_pool_mgr()
    assert mapping == {Role.Actor: (dict, ReplaySettings("R3", None)), Role.RefPolicy: worker}


def test_the_step_travels_with_the_batch_and_not_with_rows_of_an_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.replay.batch_routes import REPLAY_STEP
    from recipe.offpolicy.trainer.replaying_trainer import ReplayingTrainer
    from recipe.offpolicy.trainer.trainer_v1 import OffPolicyTrainer

    seen: list[dict[str, Any]] = []

    def look(self: Any, batch: Any, other: Any) -> Any:
        seen.append(dict(batch.extra_info))
        return batch

    for name in ("_compute_old_log_prob", "_update_actor", "_compute_log_probs"):
        monkeypatch.setattr(OffPolicyTrainer, name, look)
    trainer: Any = object.__new__(ReplayingTrainer)
    trainer.global_steps = 4
    trainer.recording = SimpleNamespace(settings=None)
    batch, metrics = SimpleNamespace(extra_info={}), dict[str, float]()
    trainer._compute_old_log_prob(batch, metrics)
    trainer._compute_log_probs(batch, [])
    assert batch.extra_info == {REPLAY_STEP: 4}
    trainer._update_actor(batch, metrics)
    assert seen == [{REPLAY_STEP: 4}, {}, {REPLAY_STEP: 4}]
    assert metrics == {}


@pytest.mark.parametrize(
    ("step", "changes", "native"),
    [(1, {}, True), (3, {"every": 2}, True), (2, {"every": 2}, False), (1, {"without_replay": False}, False)],
)
def test_pi_old_without_replay_is_computed_before_that_with_it(
    step: int, changes: dict[str, Any], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a pass whose batch names no step to replay, in the steps that are recorded alone."""
    from recipe.offpolicy.recording.record_settings import RecordSettings
    from recipe.offpolicy.recording.schema import WITHOUT_REPLAY
    from recipe.offpolicy.replay.batch_routes import REPLAY_STEP
    from recipe.offpolicy.trainer import replaying_trainer
    from recipe.offpolicy.trainer.trainer_v1 import OffPolicyTrainer

    passes: list[dict[str, Any]] = []
    put: dict[str, Any] = {}

    def read(batch: Any, *names: str) -> dict[str, Any]:
        # A prompt of two tokens and a response of two; log-probs stand at the token before.
        nested = {"log_probs": [[-9.0, -1.0, -2.0, -9.0]], "response_mask": [[1, 1]]}
        return {
            name: torch.nested.as_nested_tensor([torch.tensor(row) for row in nested[name]], layout=torch.jagged)
            for name in names
        }

    def put_columns(batch: Any, **columns: Any) -> Any:
        put.update(columns)
        return batch

    monkeypatch.setattr(OffPolicyTrainer, "_compute_old_log_prob", lambda self, batch, metrics: batch)
    monkeypatch.setattr(replaying_trainer, "read_columns", read)
    monkeypatch.setattr(replaying_trainer, "put_columns", put_columns)
    trainer: Any = object.__new__(replaying_trainer.ReplayingTrainer)
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 0.7}}})
    trainer.global_steps = step
    trainer.recording = SimpleNamespace(settings=RecordSettings.at("there", **{"without_replay": True, **changes}))
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=lambda batch: passes.append(dict(batch.extra_info)))
    batch = SimpleNamespace(extra_info={})
    trainer._compute_old_log_prob(batch, {})
    assert batch.extra_info[REPLAY_STEP] == step
    assert len(passes) == native
    if native:
        assert passes == [{"calculate_entropy": False, "compute_loss": False, "temperature": 0.7}]
        (row,) = put[WITHOUT_REPLAY].unbind()
        assert row.tolist() == [-1.0, -2.0]
    else:
        assert not put


def test_each_update_is_judged_by_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 5 and 7 tokens, two epochs."""
    from recipe.offpolicy.replay.fsdp_engine import REPORT
    from recipe.offpolicy.trainer import replaying_trainer
    from recipe.offpolicy.trainer.trainer_v1 import OffPolicyTrainer

    judged: list[Any] = []

    def judge(reports: Any, mode: str, *, tokens: int) -> Any:
        judged.append((reports, mode, tokens))
        return ""

    monkeypatch.setattr(OffPolicyTrainer, "_update_and_collect", lambda self, update, batch: update(batch))
    monkeypatch.setattr(replaying_trainer, "judge", judge)
    trainer: Any = object.__new__(replaying_trainer.ReplayingTrainer)
    trainer.config = config("R2")
    tags = [{"prompt_len": 2, "response_len": 3}, {"prompt_len": 4, "response_len": 3}]
    output = trainer._update_and_collect(lambda batch: {"metrics": {REPORT: [["report"]]}}, SimpleNamespace(tags=tags))
    assert output == {"metrics": {}}
    assert judged == [(["report"], "R2", 24)]
    assert trainer._reports == ("report",)


def test_a_step_says_what_all_its_updates_did(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.trainer import replaying_trainer
    from recipe.offpolicy.trainer.trainer_v1 import OffPolicyTrainer

    made: tuple[int, ...] = (1, 2)

    def step(self: Any, metrics: dict[str, Any], timing_raw: Any) -> str:
        assert self._reports == ()
        self._reports = made
        return "batch"

    monkeypatch.setattr(OffPolicyTrainer, "step", step)
    monkeypatch.setattr(replaying_trainer, "measure_routes", lambda reports: {"bytes": float(sum(reports))})
    trainer: Any = object.__new__(replaying_trainer.ReplayingTrainer)
    metrics: dict[str, Any] = {}
    for _ in range(2):
        assert trainer.step(metrics, {}) == "batch"
        assert metrics == {"offpolicy/routing/bytes": 3.0}
    made = ()
    assert trainer.step(empty := {}, {}) == "batch"
    assert empty == {}
