"""The configurations in which verl's key of routing replay acts with FSDP, and the errors of our key."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.replay.batch_routes import ReplaySettings, find_problems, replays_on_fsdp
from verl_patches.execution_path import LivePath


def composed(mode: str = "R3", trainer: bool = True, **replay: Any) -> DictConfig:
    actor = {"strategy": "fsdp2", "fsdp_config": {"router_replay": {"mode": mode}}}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor},
            "trainer": {"use_v1": trainer},
            "offpolicy": {"replay": {"oldest": None, **replay}},
        }
    )


@pytest.mark.parametrize("release", ["0.7.1", "0.8.0", "0.9.0", "0.9.1"])
@pytest.mark.parametrize("trainer", ["v0", "v1"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "megatron"])
def test_the_key_is_live_on_one_path(release: str, trainer: str, strategy: str) -> None:
    path = LivePath(release, trainer, "engine", strategy)
    live = (release, trainer) == ("0.9.1", "v1") and strategy != "megatron"
    assert replays_on_fsdp(path) is live
    assert (ReplaySettings.from_config(composed(), path) is not None) is live


@pytest.mark.verl("==0.9.1")
@pytest.mark.parametrize(
    ("config", "found"),
    [
        (composed(), []),
        (composed(oldest=0), []),
        (composed("R2", oldest=1), [("offpolicy.replay.oldest", 1)]),
        (composed("disabled", oldest=1), [("offpolicy.replay.oldest", 1)]),
        (composed(trainer=False, oldest=1), [("offpolicy.replay.oldest", 1)]),
    ],
    ids=str,
)
def test_what_is_wrong_with_ours_is_named(config: DictConfig, found: list[Any]) -> None:
    assert [(problem.key, problem.value) for problem in find_problems(config)] == found
