"""Settings of verl's that replay does not go together with."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.replay.obstacles import list_obstacles


def test_what_is_not_set_is_no_obstacle() -> None:
    assert list_obstacles(OmegaConf.create({})) == []


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("actor_rollout_ref.model.use_fused_kernels", True, False),
        ("actor_rollout_ref.model.lora_adapter_path", "adapter", None),
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", 2, 1),
        ("actor_rollout_ref.rollout.name", "sglang", "vllm"),
    ],
)
def test_each_names_its_key_and_the_value_that_mends_it(key: str, value: Any, wanted: Any) -> None:
    config = OmegaConf.create({})
    OmegaConf.update(config, key, value)
    (found,) = list_obstacles(config)
    assert (found.key, found.wanted) == (key, wanted)
    OmegaConf.update(config, key, wanted)
    assert list_obstacles(config) == []


def test_the_trainers_own_routes_come_from_no_engine() -> None:
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sglang"}}})
    assert list_obstacles(config, "R2") == []
