"""``correction.proximal=auto``: when the forward pass for pi_old is skipped, and the reason if it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.preflight.composed import Composed, check_one_mini_batch, choose_proximal, read_correction
from recipe.offpolicy.preflight.model_files import describe_noise, find_noise
from tests.support.corrections import TIS
from tests.support.short_keys import read_changes, read_table

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 1}
Configuration = Callable[..., DictConfig]


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """Folders that contain only a model's configuration."""

    def made(**values: Any) -> str:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(QWEN2 | values))
        return str(folder)

    return made


@pytest.fixture
def configuration(model: Callable[..., str]) -> Configuration:
    """One gradient step per batch, and nothing that prevents ``reuse``."""

    def made(changes: dict[str, Any] | None = None, **correction: Any) -> DictConfig:
        config = OmegaConf.create(
            {
                "correction": {"weight": TIS, "masks": {}, "proximal": "auto", **correction},
                "offpolicy": {"shadow": [], "alarms": {"ess": {"action": "warn", "fallback": None}}},
                "data": {"train_batch_size": 8},
                "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "rollout_correction": None},
                "trainer": {
                    "use_v1": True,
                    "v1": {"trainer_mode": "sync", "separate_async": {"parameter_sync_step": 2}},
                },
                "actor_rollout_ref": {
                    "model": {"path": model(), "override_config": {}, "trust_remote_code": False},
                    "actor": {
                        "strategy": "fsdp2",
                        "ppo_mini_batch_size": 8,
                        "ppo_epochs": 1,
                        "shuffle": False,
                        "use_dynamic_bsz": False,
                        "ppo_micro_batch_size_per_gpu": 4,
                        "ppo_max_token_len_per_gpu": 100,
                        "fsdp_config": {},
                    },
                    "rollout": {
                        "n": 2,
                        "log_prob_use_dynamic_bsz": False,
                        "log_prob_micro_batch_size_per_gpu": 4,
                        "log_prob_max_token_len_per_gpu": 200,
                        "agent": {"default_agent_loop": "single_turn_agent"},
                    },
                },
            }
        )
        for key, value in (changes or {}).items():
            OmegaConf.update(config, key, value, force_add=True, merge=False)
        return config

    return made


TABLE = dict(read_table("proximal.txt"))


@pytest.mark.parametrize("changes", [changes for (changes,) in TABLE["reuse"]])
def test_nor_do_these(changes: str, configuration: Configuration) -> None:
    assert choose_proximal(Composed(configuration(read_changes(changes)))).proximal == "reuse"


@pytest.mark.parametrize(("changes", "said"), TABLE["recompute"])
def test_what_takes_a_forward_pass(changes: str, said: str, configuration: Configuration) -> None:
    choice = choose_proximal(Composed(configuration(read_changes(changes))))
    assert choice.proximal == "recompute"
    assert choice.said.startswith("correction.proximal=auto selects recompute, although a batch gets one gradient")
    assert said in choice.said
    assert choice.said.endswith(".")


@pytest.mark.parametrize(
    "changes",
    [
        {"data.train_batch_size": 16},
        {f"{ACTOR}.ppo_epochs": 2},
        {"correction.weight": None},
        {"correction.weight.upper": -1.0},
    ],
)
def test_where_there_is_nothing_to_choose_nothing_is_said(
    changes: dict[str, Any], configuration: Configuration
) -> None:
    choice = choose_proximal(Composed(configuration(changes)))
    assert (choice.proximal, choice.said) == ("recompute", "")


def read_spec(config: DictConfig) -> CorrectionSpec:
    return CorrectionSpec.from_mapping(read_correction(Composed(config)))


def test_a_correction_never_sees_auto(configuration: Configuration) -> None:
    assert read_spec(configuration()).proximal == "reuse"
    assert read_spec(configuration({f"{ACTOR}.ppo_epochs": 3})).proximal == "recompute"
    with pytest.raises(SpecError, match="Set one of recompute"):
        CorrectionSpec.from_mapping({"proximal": "auto"})


def test_more_rows_than_a_mini_batch_stop_the_run(configuration: Configuration) -> None:
    config = configuration()
    spec = read_spec(config)
    check_one_mini_batch(spec, config, 16)
    with pytest.raises(SpecError, match=r"a batch of 32 rows arrived, but a mini-batch has 16.*proximal=recompute"):
        check_one_mini_batch(spec, config, 32)
    check_one_mini_batch(CorrectionSpec.from_mapping({"weight": TIS}), config, 32)


NOISY: list[tuple[dict[str, Any], list[str]]] = [
    ({"attention_dropout": 0.0, "hidden_dropout": "0", "dropout": None}, []),
    ({"attention_dropout": 0.1, "resid_pdrop": 0.2}, ["attention_dropout", "resid_pdrop"]),
    ({"text_config": {"router_jitter_noise": 0.01}}, ["text_config.router_jitter_noise"]),
    ({"classifier_dropout": 0.1, "summary_first_dropout": 0.1}, []),
]


@pytest.mark.parametrize(("values", "names"), NOISY)
def test_what_makes_a_forward_pass_random(values: dict[str, Any], names: list[str]) -> None:
    assert [name for name, _ in find_noise(values)] == names


def test_defaults_of_the_models_class_count(configuration: Configuration, model: Callable[..., str]) -> None:
    """GPT-2 has dropout unless its configuration says otherwise."""
    gpt2 = configuration({f"{MODEL}.path": model(model_type="gpt2")})
    assert "=0.1 in training" in describe_noise(gpt2)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        OmegaConf.update(gpt2, f"{MODEL}.override_config.{name}", 0.0, force_add=True)
    assert describe_noise(gpt2) == ""


def test_code_of_the_models_own_is_not_known(configuration: Configuration, model: Callable[..., str]) -> None:
    path = model(auto_map={"AutoModelForCausalLM": "mine.Mine"})
    assert describe_noise(configuration({f"{MODEL}.path": path})) == ""  # verl takes the library's class
    own = configuration({f"{MODEL}.path": path, f"{MODEL}.trust_remote_code": True})
    assert "its own code" in describe_noise(own)
