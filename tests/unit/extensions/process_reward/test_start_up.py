"""Start-up checks: each error names key and reason, and its override fixes it."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.extensions.process_reward import settings as start_up
from recipe.offpolicy.extensions.process_reward.prefix_value_rewards import PrefixValueRewards
from recipe.offpolicy.extensions.process_reward.settings import MANAGER, find_manager
from tests.support.byte_tokenizer import build_byte_tokenizer
from verl_patches.releases import attributes_of

pytestmark = pytest.mark.verl("==0.9.1")


def config(**changed: Any) -> DictConfig:
    made = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2", "use_kl_loss": False},
                "rollout": {"name": "vllm", "max_model_len": 200, "agent": {"agent_loop_manager_class": None}},
                "model": {"path": "no/such/model"},
            },
            "algorithm": {"adv_estimator": "grpo", "gamma": 1.0, "use_kl_in_reward": False},
            "data": {"max_prompt_length": 64, "max_response_length": 64},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "offpolicy": {"staleness": {"eta": None, "too_old": "wait"}},
        }
    )
    for key, value in changed.items():
        OmegaConf.update(made, key, value, force_add=True)
    return made


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The byte tokenizer, in which the force prompt has 24 tokens."""
    monkeypatch.setattr(start_up, "load_tokenizer", lambda path: build_byte_tokenizer([]))


def problems(made: DictConfig, **settings: Any) -> list[Any]:
    extension = PrefixValueRewards("process_reward", settings)
    extension.configure(made)
    return list(extension.problems(made))


def test_a_configuration_that_is_fine_has_no_problem_and_gets_the_manager_of_its_trainer() -> None:
    made = config()
    assert problems(made) == []
    assert OmegaConf.select(made, MANAGER) == find_manager(made)
    assert find_manager(made).endswith("manager_v1.ScoringManagerV1")
    assert find_manager(config(**{"trainer.use_v1": False})).endswith("manager.ScoringManagerV0")


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("key", "value", "reason", "override"),
    [
        (f"{ROLLOUT}.name", "sglang", "values are requested from vLLM", f"{ROLLOUT}.name=vllm"),
        (
            f"{ROLLOUT}.disaggregation.enabled",
            True,
            "the server that decodes a prefix",
            f"{ROLLOUT}.disaggregation.enabled=false",
        ),
        (MANAGER, "mine.Manager", "sequences would bypass the agent loop manager of process_reward", f"{MANAGER}=null"),
        ("algorithm.use_kl_in_reward", True, "sums the KL penalty", "algorithm.use_kl_in_reward=false"),
        ("algorithm.gamma", 0.9, "without a discount", "algorithm.gamma=1.0"),
        (f"{ROLLOUT}.max_model_len", 184, "184 tokens", f"{ROLLOUT}.max_model_len=185"),
    ],
)
def test_what_it_cannot_stand_beside_is_refused(key: str, value: Any, reason: str, override: str) -> None:
    """Lengths: 64 + 64 + 24 of the force prompt + 32 of the answer + 1 decoded token."""
    (found,) = problems(config(**{key: value}))
    assert (found.key, found.verdict) == (key, "ERROR")
    assert reason in str(found)
    assert override in f"{found.pasted} {found.advice}"


def test_a_filter_of_groups_makes_it_inert_where_it_is_meant_for() -> None:
    (found,) = problems(config(**{"algorithm.filter_groups.enable": True}))
    assert (found.verdict, found.overrides) == ("NO-OP", ())


def test_release_0_7_1_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    old = SimpleNamespace(release="0.7.1", trainer="v0", attributes=attributes_of("0.7.1"))
    monkeypatch.setattr(start_up, "live_path", lambda config: old)
    (found,) = PrefixValueRewards("process_reward", {}).problems(config())
    assert "rollout server of verl 0.7.1 drops vLLM's prompt_logprobs" in str(found)
    assert found.overrides == ()
    assert "verl 0.8.0 or later, or set process_reward=null" in found.fix


CHECKS = {"monte_carlo": {"every": 4, "share": 0.25}}
STEP = {"data.train_batch_size": 16, "actor_rollout_ref.rollout.n": 8}


@pytest.mark.parametrize(
    ("changed", "settings", "verdict", "said"),
    [
        ({"reward.reward_model.enable": True}, CHECKS, "ERROR", "so continuations get no reward"),
        ({"actor_rollout_ref.rollout.multi_turn.enable": True}, CHECKS, "NOTE", "continued without tools"),
        ({}, {"monte_carlo": {"every": 4, "share": 0.05}}, "NOTE", "about 6 of 128 sequences"),
    ],
)
def test_weak_checks_by_rollouts(changed: dict[str, Any], settings: dict[str, Any], verdict: str, said: str) -> None:
    (problem,) = problems(config(**STEP, **changed), **settings)
    assert (problem.verdict, said in problem.reason) == (verdict, True)


def test_checks_by_rollouts_and_a_penalty_of_waste_are_fine() -> None:
    pool = {"reward.reward_model.enable": True, "reward.reward_model.enable_resource_pool": True}
    assert problems(config(**STEP, **pool), **CHECKS, waste={"penalty": 0.1}) == []
