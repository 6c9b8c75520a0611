"""Where verl's key of routing replay is live on FSDP, and what is wrong with ours."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.replay.batch_routes import ReplaySettings, find_problems, replays_on_fsdp
from verl_patches.execution_path import LivePath

V1 = LivePath("0.9.1", "v1", "engine", "fsdp2")


def composed(mode: str = "R3", trainer: bool = True, **replay: Any) -> DictConfig:
    actor = {"strategy": "fsdp2", "fsdp_config": {"router_replay": {"mode": mode}}}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor},
            "trainer": {"use_v1": trainer},
            "offpolicy": {"replay": {"oldest": None, **replay}},
        }
    )


@pytest.mark.parametrize(
    ("path", "live"),
    [
        (V1, True),
        (LivePath("0.9.1", "v1", "engine", "fsdp"), True),
        (LivePath("0.9.1", "v1", "engine", "megatron"), False),
        (LivePath("0.9.1", "v0", "engine", "fsdp2"), False),
        (LivePath("0.9.0", "v1", "engine", "fsdp2"), False),
        (LivePath("0.8.0", "v0", "engine", "fsdp2"), False),
        (LivePath("0.7.1", "v0", "legacy", "fsdp"), False),
    ],
    ids=str,
)
def test_the_key_is_live_on_one_path(path: LivePath, live: bool) -> None:
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
