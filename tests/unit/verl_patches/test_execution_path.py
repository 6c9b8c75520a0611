"""The path of a configuration in each release, and the settings that are rejected on it."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.preflight.checks.path import check_path
from tests.support.applications import composed
from verl_patches.execution_path import LivePath, count_prompts, describe_mode, find_program_mode, live_path


def configuration(release: str, **changes: Any) -> DictConfig:
    """The deciding keys of a release's own configuration; ``__`` stands for a dot."""
    trainer: dict[str, Any] = {
        "0.7.1": {"use_legacy_worker_impl": "auto"},
        "0.8.0": {},
        "0.9.0": {"use_v1": True, "v1": {"trainer_mode": "sync", "separate_async": {"parameter_sync_step": 2}}},
        "0.9.1": {"use_v1": True, "v1": {"trainer_mode": "sync", "separate_async": {"parameter_sync_step": 2}}},
    }[release]
    config = OmegaConf.create(
        {
            "trainer": trainer | {"device": "cuda"},
            "actor_rollout_ref": {
                "model": {"use_remove_padding": True},
                "actor": {"strategy": "fsdp2", "fsdp_config": {"param_offload": False}},
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


@pytest.mark.parametrize(
    ("release", "changes", "trainer", "worker"),
    [
        ("0.7.1", {}, "v0", "legacy"),
        ("0.7.1", {"trainer__use_legacy_worker_impl": "disable"}, "v0", "engine"),
        ("0.8.0", {}, "v0", "engine"),
        ("0.9.0", {}, "v1", "engine"),
        ("0.9.0", {"trainer__v1__trainer_mode": "colocate_async"}, "v1", "engine"),
        ("0.9.1", {}, "v1", "engine"),
        ("0.9.1", {"trainer__use_v1": False}, "v0", "engine"),
    ],
)
def test_the_path_of_each_release(release: str, changes: dict[str, Any], trainer: Any, worker: Any) -> None:
    config = configuration(release, **changes)
    path = live_path(config, release)
    mode = changes.get("trainer__v1__trainer_mode", "sync")
    assert path == LivePath(release, trainer, worker, "fsdp2", mode)
    assert list(check_path(composed(config, path=path))) == []
    assert f"verl {release}, {trainer.upper()} trainer, {worker}" in str(path)
    assert str(path).endswith(f"mode {mode}")


def test_the_engine_of_0_7_takes_fsdps_version_from_its_own_section() -> None:
    changes = {"actor_rollout_ref__actor__fsdp_config__strategy": "fsdp"}
    for legacy, release, strategy in (
        ("disable", "0.7.1", "fsdp"),
        ("auto", "0.7.1", "fsdp2"),
        ("disable", "0.8.0", "fsdp2"),
    ):
        config = configuration(release, trainer__use_legacy_worker_impl=legacy, **changes)
        assert live_path(config, release).strategy == strategy


OWN_SECTIONS = {
    "fully_async": {"async_training": {"require_batches": 2}, "rollout": {"nnodes": 1}},
    "one_step_off": {"rollout": {"nnodes": 1}},
    "sync": {},
}


@pytest.mark.parametrize("mode", OWN_SECTIONS)
def test_a_program_of_verls_is_known_by_the_sections_of_its_configuration(mode: str) -> None:
    actor = {"strategy": "fsdp", "ppo_mini_batch_size": 8}
    own = {"actor_rollout_ref": {"actor": actor}, "data": {"train_batch_size": 32}, **OWN_SECTIONS[mode]}
    config = OmegaConf.create(own)
    path = live_path(config, "0.9.1")
    assert (path.trainer, path.mode, path.asynchronous) == ("v0", mode, mode != "sync")
    # Fully asynchronous training takes two mini-batches for an update, and has no batch size of its own.
    assert count_prompts(config) == (16 if mode == "fully_async" else 32)
    assert find_program_mode(config) == (None if mode == "sync" else mode)
    assert describe_mode(config)[1] == mode
