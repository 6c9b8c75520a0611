"""Keys of snapshots: what is refused, with an override that fixes it; a lag is that of the nearest weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.staleness import weight_snapshots
from recipe.offpolicy.staleness.weight_snapshots import find_lag, find_problems
from verl_patches.execution_path import live_path


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are asked of 0.9.1, whichever is installed."""
    monkeypatch.setattr(weight_snapshots, "live_path", lambda config: live_path(config, "0.9.1"))


def config(*changes: str, **keys: Any) -> DictConfig:
    made = OmegaConf.create(
        {
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}, "rollout": {"temperature": 1.0}},
            "offpolicy": {"late_weights": {"snapshots": 4, "rows": 8} | keys},
        }
    )
    return OmegaConf.merge(made, OmegaConf.from_dotlist(list(changes)))  # type: ignore[return-value]


def test_what_the_trainer_can_do_is_let_through() -> None:
    assert list(find_problems(config())) == []
    assert list(find_problems(config("trainer.use_v1=false", snapshots=None))) == []
    assert list(find_problems(OmegaConf.create({"offpolicy": {"late_weights": None}}))) == []


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (config("trainer.use_v1=false"), "V0 trainer"),
        (config("trainer.v1.trainer_mode=separate_async"), "recorded per token"),
        (config("actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3"), "own routes"),
        (config("actor_rollout_ref.rollout.temperature=0.7"), "temperature=0.7"),
        (config("actor_rollout_ref.actor.fsdp_config.param_offload=true"), "param_offload"),
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
