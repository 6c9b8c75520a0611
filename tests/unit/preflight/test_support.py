"""What the support of truncated sampling goes together with."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.checks.rollout import check_sampling
from recipe.offpolicy.preflight.checks.support import check_support

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
SPEC = CorrectionSpec(support="engine")


def config(**changes: Any) -> DictConfig:
    made = OmegaConf.create(
        {
            "correction": {"support": "engine"},
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2"},
                "rollout": {"name": "vllm", "temperature": 1.0, "top_p": 0.9, "top_k": -1},
            },
            "trainer": {"use_v1": True},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(made, key, value, force_add=True)
    return made


@pytest.mark.verl("==0.9.1")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{MODEL}.use_fused_kernels", True),
        (f"{MODEL}.lora_rank", 8),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 2),
        ("algorithm.use_kl_in_reward", True),
        ("actor_rollout_ref.actor.strategy", "megatron"),
    ],
)
def test_what_it_does_not_go_with_is_refused_and_mended(key: str, value: Any) -> None:
    made = config(**{key: value})
    (found,) = check_support(made, SPEC)
    assert (found.key, found.value, found.verdict) == (key, value, "ERROR")
    assert found.overrides or "or correction.support=null" in found.fix
    for override in found.overrides:
        name, _, mended = override.lstrip("+").partition("=")
        OmegaConf.update(made, name, OmegaConf.create(f"x: {mended}").x, force_add=True)
    assert list(check_support(made, SPEC if found.overrides else CorrectionSpec())) == []


@pytest.mark.verl("==0.9.1")
def test_without_truncation_it_has_no_effect() -> None:
    made = config(**{f"{ROLLOUT}.top_p": 1.0})
    (found,) = check_support(made, SPEC)
    assert (found.key, found.verdict) == ("correction.support", "NO-OP")
    for key, value in ((f"{ROLLOUT}.top_k", 5), ("correction.support_min_p", 0.1)):
        assert list(check_support(config(**{f"{ROLLOUT}.top_p": 1.0, key: value}), SPEC)) == []


def test_off_nothing_is_checked() -> None:
    assert list(check_support(config(**{f"{MODEL}.use_fused_kernels": True}), CorrectionSpec())) == []


@pytest.mark.verl("!=0.9.1")
def test_another_release_is_refused() -> None:
    (found,) = check_support(config(**{"trainer.use_v1": False}), SPEC)
    assert (found.key, found.overrides) == ("correction.support", ())


def test_truncation_is_what_it_is_for_and_a_repetition_penalty_is_not() -> None:
    made = config(**{f"{ROLLOUT}.top_k": 5})
    assert list(check_sampling(made, SPEC)) == []
    for key, value, wanted in (
        (f"{ROLLOUT}.repetition_penalty", 1.1, 1),
        # verl hands neither of these on with a request.
        (f"{ROLLOUT}.min_p", 0.1, 0),
        (f"{ROLLOUT}.engine_kwargs.vllm.override_generation_config.top_k", 5, -1),
    ):
        (found,) = check_sampling(config(**{key: value}), SPEC)
        assert (found.key, found.overrides) == (key, ())
        assert found.fix == f"Set {key}={wanted}, or correction.support=null."
