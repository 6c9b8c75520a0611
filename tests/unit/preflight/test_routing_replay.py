"""What routing replay goes together with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.checks.routing_replay import (
    WITHOUT_REPLAY,
    check_megatron_replay,
    check_recorded_without_replay,
    check_routing_replay,
)

pytestmark = pytest.mark.verl("==0.9.1")
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
MODE = f"{ACTOR}.fsdp_config.router_replay.mode"


def config(**changes: Any) -> DictConfig:
    """Two gradient steps on each batch."""
    made = OmegaConf.create(
        {
            "data": {"train_batch_size": 16},
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2", "ppo_mini_batch_size": 8, "ppo_epochs": 1},
                "rollout": {"name": "vllm"},
                "model": {"path": "somewhere"},
            },
            "trainer": {"use_v1": True},
        }
    )
    for key, value in {MODE: "R3", **changes}.items():
        OmegaConf.update(made, key, value, force_add=True)
    return made


def check(made: DictConfig) -> list[tuple[str, Any, str]]:
    return [(found.key, found.value, found.verdict) for found in check_routing_replay(made, CorrectionSpec())]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{MODEL}.use_fused_kernels", True),
        (f"{MODEL}.mtp.enable", True),
        (f"{MODEL}.lora_rank", 8),
        (f"{MODEL}.lora.rank", 8),
        (f"{MODEL}.lora_adapter_path", "adapter"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2),
        (f"{ACTOR}.ulysses_sequence_parallel_size", 2),
        ("actor_rollout_ref.rollout.name", "sglang"),
    ],
)
def test_what_it_does_not_go_with_is_refused_and_mended(key: str, value: Any) -> None:
    made = config(**{key: value})
    (found,) = check_routing_replay(made, CorrectionSpec())
    assert (found.key, found.value, found.verdict) == (key, value, "ERROR")
    (override,) = found.overrides
    name, _, mended = override.lstrip("+").partition("=")
    OmegaConf.update(made, name, OmegaConf.create(f"value: {mended}").value)
    assert check(made) == []
    assert check(config(**{key: value, MODE: "disabled"})) == []


def test_the_trainers_own_routes_do_not_ask_for_an_engine() -> None:
    assert check(config(**{MODE: "R2", "actor_rollout_ref.rollout.name": "sglang"})) == []


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_single_gradient_step_has_no_use_for_it(mode: str) -> None:
    made = config(**{MODE: mode, f"{ACTOR}.ppo_mini_batch_size": 16})
    assert check(made) == [(MODE, mode, "NO-OP")]


@pytest.mark.parametrize(("values", "refused"), [({"num_experts": 8}, False), ({"hidden_size": 8}, True)], ids=str)
def test_a_model_without_experts_is_refused(tmp_path: Path, values: dict[str, int], refused: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert check(config(**{f"{MODEL}.path": str(tmp_path)})) == [(MODE, "R3", "ERROR")] * refused


def test_padded_tokens_under_packed_routes_are_refused_on_megatron() -> None:
    key = f"{ACTOR}.megatron.use_remove_padding"
    mode = f"{ACTOR}.megatron.router_replay.mode"
    changes = {f"{ACTOR}.strategy": "megatron", MODE: "disabled", mode: "R2", key: False}
    (found,) = check_megatron_replay(config(**changes), CorrectionSpec())
    assert (found.key, found.value, found.verdict) == (key, False, "ERROR")
    assert found.overrides == (f"{key}=true",)
    for mended in ({key: True}, {mode: "disabled"}, {f"{ACTOR}.strategy": "fsdp2"}):
        assert list(check_megatron_replay(config(**{**changes, **mended}), CorrectionSpec())) == []


@pytest.mark.parametrize(
    ("changes", "proximal", "reason"),
    [
        ({}, "recompute", ""),
        ({WITHOUT_REPLAY: False, MODE: "disabled"}, "recompute", ""),
        ({MODE: "R2"}, "recompute", "computed without replay already"),
        ({MODE: "disabled"}, "recompute", "computed without replay already"),
        ({"trainer.use_v1": False}, "recompute", "computed without replay already"),
        ({}, "bypass", "there is no pi_old by replayed routes"),
        ({}, "same_engine", "there is no pi_old by replayed routes"),
    ],
)
def test_log_probs_without_replay_stand_beside_those_with_it(
    changes: dict[str, Any], proximal: Any, reason: str
) -> None:
    made = config(**{WITHOUT_REPLAY: True, **changes})
    found = list(check_recorded_without_replay(made, CorrectionSpec(proximal=proximal)))
    assert [one.key for one in found] == [WITHOUT_REPLAY] * bool(reason)
    for one in found:
        assert reason in one.reason
        assert one.overrides == (f"{WITHOUT_REPLAY}=false",)
