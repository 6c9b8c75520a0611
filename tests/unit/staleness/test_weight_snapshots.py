"""Snapshots of weights: by how many updates the engine is late, and keys that are rejected."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.staleness import weight_snapshots
from recipe.offpolicy.staleness.weight_snapshots import find_lag, find_problems
from verl_patches.execution_path import live_path

pytestmark = pytest.mark.verl("==0.9.1")

pytest.importorskip("verl.trainer.ppo.v1")


class Workers:
    """A policy with one number, log pi of every token, which training moves by -0.25 per step."""

    def __init__(self) -> None:
        self.log_pi, self.saved = -1.0, {}

    def save_model_to_cpu(self, name: str) -> None:
        self.saved[name] = self.log_pi

    def restore_model_from_cpu(self, name: str) -> None:
        self.log_pi = self.saved[name]

    def clear_cpu_model(self, name: str) -> None:
        del self.saved[name]


class View:
    """Three rows that ``log_mu`` sampled; the last row contains a tool's token."""

    def __init__(self, workers: Workers, log_mu: float) -> None:
        self.token_ids = [([1], [2, 3]), ([1], [4]), ([1], [5, 6])]
        self._workers = workers
        self._mask = torch.tensor([[1, 1], [1, 0], [1, 0]])
        self._mu = torch.where(self._mask.bool(), log_mu, 0.0)

    def rows(self, *names: str) -> dict[str, torch.Tensor]:
        return {"response_mask": self._mask, "rollout_log_probs": self._mu}

    def compute_log_probs(self, rows: Any) -> list[list[float]]:
        return [[self._workers.log_pi] * len(response) for _, response in rows]


def run(snapshots: int) -> tuple[Any, Any, Workers]:
    """A run and its add-on."""
    from recipe.offpolicy.staleness.weight_snapshots import SnapshotSettings, WeightSnapshots

    workers = Workers()
    made: Any = SimpleNamespace(workers=workers, view=lambda batch: batch)
    return made, WeightSnapshots(made, SnapshotSettings(snapshots, 3)), workers


def lags(lag: int, snapshots: int, steps: int = 6) -> list[float]:
    made, add_on, workers = run(snapshots)
    found, history = [], []
    for made.global_steps in range(1, steps + 1):
        history.append(workers.log_pi)
        metrics: dict[str, float] = {}
        add_on.old_log_prob(lambda batch: batch, View(workers, history[max(len(history) - 1 - lag, 0)]), metrics)
        assert workers.log_pi == history[-1]
        found.append(metrics["offpolicy/late_weights/lag"])
        assert len(workers.saved) == min(made.global_steps, snapshots + 1)
        workers.log_pi -= 0.25
    return found


def test_the_lag_grows_to_what_it_is_and_is_told_each_time_it_grows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "verl.offpolicy"):
        assert lags(3, 8) == [0, 1, 2, 3, 3, 3]
    assert [record.args[0] for record in caplog.records] == [1, 2, 3]  # type: ignore[index]
    assert "lag by 3 updates: the mean |log mu - log pi| of 3 sequences is 0 nats" in caplog.records[-1].message


def test_a_lag_beyond_the_snapshots_is_not_told() -> None:
    """With two snapshots and a lag of five, the nearest snapshot is the oldest, 0.75 of 1.25 nats away."""
    assert str(lags(5, 2)[-1]) == "nan"


def test_the_workers_weights_are_put_back_where_scoring_fails() -> None:
    made, add_on, workers = run(4)
    made.global_steps = 1
    view = View(workers, -1.0)
    view.compute_log_probs = lambda rows: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        add_on.old_log_prob(lambda batch: batch, view, {})
    assert workers.log_pi == -1.0


def test_the_actors_worker_is_the_one_that_keeps_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.extensions.add_ons import AddOns
    from recipe.offpolicy.trainer import corrected_run
    from verl.experimental.separation.engine_workers import DetachActorWorker
    from verl.trainer.ppo.utils import Role

    _, add_on, _ = run(4)
    worker = SimpleNamespace(__ray_actor_class__=dict)
    trainer: Any = SimpleNamespace(role_worker_mapping={Role.ActorRollout: worker, Role.RefPolicy: worker})
    made = corrected_run.CorrectedRun(trainer)
    made.add_ons = AddOns(own=[add_on])
    monkeypatch.setattr(corrected_run.ray, "remote", lambda kind: kind)
    made._choose_actor_class()
    assert trainer.role_worker_mapping == {Role.ActorRollout: DetachActorWorker, Role.RefPolicy: worker}


# Keys of snapshots: what is refused, with an override that fixes it; a lag is that of the nearest weights


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are made for 0.9.1, whichever release is installed."""
    monkeypatch.setattr(weight_snapshots, "live_path", lambda config: live_path(config, "0.9.1"))


def configure(*changes: str, **keys: Any) -> DictConfig:
    made = OmegaConf.create(
        {
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}, "rollout": {"temperature": 1.0}},
            "offpolicy": {"late_weights": {"snapshots": 4, "rows": 8} | keys},
        }
    )
    return OmegaConf.merge(made, OmegaConf.from_dotlist(list(changes)))  # type: ignore[return-value]


def test_what_the_trainer_can_do_is_let_through() -> None:
    assert list(find_problems(configure())) == []
    assert list(find_problems(configure("trainer.use_v1=false", snapshots=None))) == []
    assert list(find_problems(OmegaConf.create({"offpolicy": {"late_weights": None}}))) == []


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (configure("trainer.use_v1=false"), "V0 trainer"),
        (configure("trainer.v1.trainer_mode=separate_async"), "recorded per token"),
        (configure("actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3"), "own routes"),
        (configure("actor_rollout_ref.rollout.temperature=0.7"), "temperature=0.7"),
        (configure("actor_rollout_ref.actor.fsdp_config.param_offload=true"), "param_offload"),
    ],
)
def test_each_obstacle_is_named_with_what_mends_it(made: DictConfig, word: str) -> None:
    (problem,) = find_problems(made)
    assert word in str(problem)
    assert problem.overrides == ()
    assert "or offpolicy.late_weights" in problem.fix


def test_a_lag_is_that_of_the_weights_nearest_to_mu() -> None:
    assert find_lag([0.4, 0.3, 1e-5, 0.2]) == 2
    assert find_lag([2e-3, 0.3, 0.4]) == 0  # two engines, in step
    assert find_lag([0.1]) == 0
    assert find_lag([0.30, 0.28, 0.29]) is None  # mu is of neither
    assert find_lag([0.3, math.nan]) is None
