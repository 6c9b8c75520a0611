"""Which path a configuration goes through, release by release, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.preflight.checks.path import check_path
from tests.support.applications import composed
from verl_patches.execution_path import LivePath, count_prompts, describe_mode, find_program_mode, live_path

ACTOR = "actor_rollout_ref.actor"
LEGACY = "trainer.use_legacy_worker_impl"
REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"


def configuration(release: str, **changes: Any) -> DictConfig:
    """What a release's own configuration holds of the keys that decide; ``__`` stands for a dot."""
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
        ("0.7.1", {"trainer__use_legacy_worker_impl": "enable"}, "v0", "legacy"),
        ("0.7.1", {"trainer__use_legacy_worker_impl": "disable"}, "v0", "engine"),
        ("0.8.0", {"trainer__use_legacy_worker_impl": "disable"}, "v0", "engine"),
        ("0.8.0", {"trainer__use_v1": False}, "v0", "engine"),
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


def test_a_release_without_the_key_has_its_own_default() -> None:
    config = configuration("0.7.1")
    del config.trainer["use_legacy_worker_impl"]
    assert live_path(config, "0.7.1").worker == "legacy"


def test_the_engine_of_0_7_takes_fsdps_version_from_its_own_section() -> None:
    changes = {"actor_rollout_ref__actor__fsdp_config__strategy": "fsdp"}
    for legacy, release, strategy in (
        ("disable", "0.7.1", "fsdp"),
        ("auto", "0.7.1", "fsdp2"),
        ("disable", "0.8.0", "fsdp2"),
    ):
        config = configuration(release, trainer__use_legacy_worker_impl=legacy, **changes)
        assert live_path(config, release).strategy == strategy


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no such switch": ("0.7.1", {"trainer__use_legacy_worker_impl": "off"}, LEGACY),
    "legacy actors that are gone": ("0.8.0", {"trainer__use_legacy_worker_impl": "auto"}, LEGACY),
    "legacy actors long gone": ("0.9.1", {"trainer__use_legacy_worker_impl": "enable"}, LEGACY),
    "a trainer to come": ("0.8.0", {"trainer__use_v1": True}, "trainer.use_v1"),
    "separate_async of 0.9.0": ("0.9.0", {"trainer__v1__trainer_mode": "separate_async"}, "trainer.v1.trainer_mode"),
    "another V1 mode": ("0.9.1", {"trainer__v1__trainer_mode": "one_step"}, "trainer.v1.trainer_mode"),
    "another legacy actor": ("0.7.1", {"actor_rollout_ref__actor__strategy": "veomni"}, f"{ACTOR}.strategy"),
    "another engine": ("0.8.0", {"actor_rollout_ref__actor__strategy": "torchtitan"}, f"{ACTOR}.strategy"),
    "another engine that offloads": (
        "0.9.1",
        {
            "trainer__v1__trainer_mode": "separate_async",
            "actor_rollout_ref__actor__strategy": "veomni",
            "actor_rollout_ref__actor__veomni__param_offload": True,
        },
        f"{ACTOR}.strategy",
    ),
    "prefix grouper": ("0.7.1", {"actor_rollout_ref__actor__use_prefix_grouper": True}, f"{ACTOR}.use_prefix_grouper"),
    "padded engine of 0.7.1": (
        "0.7.1",
        {"trainer__use_legacy_worker_impl": "disable", "actor_rollout_ref__model__use_remove_padding": False},
        REMOVE_PADDING,
    ),
    "aliased snapshots": (
        "0.9.1",
        {"trainer__v1__trainer_mode": "separate_async", "actor_rollout_ref__actor__fsdp_config__param_offload": True},
        f"{ACTOR}.fsdp_config.param_offload",
    ),
    "aliased snapshots by policy": (
        "0.9.1",
        {"trainer__v1__trainer_mode": "separate_async", "actor_rollout_ref__actor__fsdp_config__offload_policy": True},
        f"{ACTOR}.fsdp_config.offload_policy",
    ),
    "dynamic context parallel": (
        "0.9.1",
        {
            "actor_rollout_ref__actor__strategy": "megatron",
            "actor_rollout_ref__actor__megatron__dynamic_context_parallel": True,
        },
        f"{ACTOR}.megatron.dynamic_context_parallel",
    ),
    "mixed micro-batches": (
        "0.7.1",
        {
            "actor_rollout_ref__actor__strategy": "megatron",
            "actor_rollout_ref__actor__megatron__override_transformer_config__overlap_moe_expert_parallel_comm": True,
        },
        f"{ACTOR}.megatron.override_transformer_config.overlap_moe_expert_parallel_comm",
    ),
}


REASONS = {
    "no such switch": "verl supports auto, enable and disable",
    "legacy actors that are gone": "verl 0.8.0 has no legacy actors",
    "legacy actors long gone": "verl 0.9.1 has no legacy actors",
    "a trainer to come": "verl 0.8.0 has no V1 trainer",
    "separate_async of 0.9.0": "verl 0.9.0 differs from 0.9.1, which was tested",
    "another V1 mode": "not covered",
    "another legacy actor": "only the FSDP and Megatron engines",
    "another engine": "only the FSDP and Megatron engines",
    "another engine that offloads": "only the FSDP and Megatron engines",
    "prefix grouper": "cannot read what its forward pass returns",
    "padded engine of 0.7.1": "masks attention by the loss mask, so its log-probs",
    "aliased snapshots": "restoring pi_old's undoes updates",
    "aliased snapshots by policy": "restoring pi_old's undoes updates",
    "dynamic context parallel": "not tested with this way of gathering metrics",
    "mixed micro-batches": "while the loss of another is computed",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    release, changes, key = REFUSED[name]
    config = configuration(release, **changes)
    (found,) = check_path(composed(config, path=live_path(config, release)))
    assert found.key == key
    assert found.value == OmegaConf.select(config, key)
    assert REASONS[name] in found.reason
    if "Megatron engines" in found.reason:  # no override keeps the engine
        assert not found.overrides
        return
    assert found.advice.startswith("Set")
    assert len(found.overrides) == 1
    if found.value == "separate_async":  # a run that was to be asynchronous stays so
        assert found.overrides == ("trainer.v1.trainer_mode=colocate_async",)


COVERED: dict[str, tuple[str, dict[str, Any]]] = {
    "padded legacy actor of 0.7.1": ("0.7.1", {"actor_rollout_ref__model__use_remove_padding": False}),
    "padded engine of 0.8.0": ("0.8.0", {"actor_rollout_ref__model__use_remove_padding": False}),
    "separate_async": ("0.9.1", {"trainer__v1__trainer_mode": "separate_async"}),
    "an update a synchronisation": (
        "0.9.1",
        {
            "trainer__v1__trainer_mode": "separate_async",
            "trainer__v1__separate_async__parameter_sync_step": 1,
            "actor_rollout_ref__actor__fsdp_config__param_offload": True,
        },
    ),
    "no snapshot is taken": (
        "0.9.1",
        {
            "trainer__v1__trainer_mode": "separate_async",
            "actor_rollout_ref__actor__fsdp_config__param_offload": True,
            "correction__proximal": "bypass",
        },
    ),
    "fully_async_policy of 0.8.0": ("0.8.0", {"async_training__require_batches": 1}),
    "one_step_off_policy of 0.9.0": ("0.9.0", {"rollout__nnodes": 1}),
    "FSDP1": ("0.8.0", {"actor_rollout_ref__actor__strategy": "fsdp"}),
    "Megatron": ("0.9.1", {"actor_rollout_ref__actor__strategy": "megatron"}),
    "legacy Megatron": ("0.7.1", {"actor_rollout_ref__actor__strategy": "megatron"}),
    "the prefix grouper on an engine": (
        "0.7.1",
        {"trainer__use_legacy_worker_impl": "disable", "actor_rollout_ref__actor__use_prefix_grouper": True},
    ),
}


@pytest.mark.parametrize("name", COVERED)
def test_what_is_not(name: str) -> None:
    release, changes = COVERED[name]
    config = configuration(release, **changes)
    assert list(check_path(composed(config, path=live_path(config, release)))) == []


def test_a_release_without_the_asynchronous_programs_is_named() -> None:
    config = configuration("0.7.1", async_training__require_batches=1, actor_rollout_ref__actor__ppo_mini_batch_size=8)
    (found,) = check_path(composed(config, path=live_path(config, "0.7.1")))
    assert (found.key, found.value, found.overrides) == ("async_training", "fully_async", ())
    assert "fully_async_policy of verl 0.7.1" in found.reason


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
