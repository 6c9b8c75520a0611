"""Settings that the support's replay does not go together with."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.support.obstacles import list_obstacles


def test_what_is_not_set_is_no_obstacle() -> None:
    assert list(list_obstacles(OmegaConf.create({}))) == []


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("actor_rollout_ref.model.use_fused_kernels", True, False),
        ("actor_rollout_ref.model.lora_adapter_path", "adapter", None),
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", 2, 1),
        ("actor_rollout_ref.actor.fsdp_config.router_replay.mode", "R3", "disabled"),
        ("algorithm.use_kl_in_reward", True, False),
        ("opd", {"teacher": {}}, None),
        ("process_reward", {"coef": 1.0}, None),
    ],
)
def test_each_names_its_key_and_the_value_that_mends_it(key: str, value: Any, wanted: Any) -> None:
    config = OmegaConf.create({})
    OmegaConf.update(config, key, value)
    ((found, _),) = list_obstacles(config)
    assert (found.key, found.wanted[0]) == (key, wanted)
    OmegaConf.update(config, key, wanted, merge=False)
    assert list(list_obstacles(config)) == []
