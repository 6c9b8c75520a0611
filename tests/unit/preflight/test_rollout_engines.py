"""Log-probs before the temperature are refused by what each rollout engine itself reads."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.checks.rollout import check_logprobs_mode
from recipe.offpolicy.preflight.composed import Composed
from tests.support.corrections import TIS

ROLLOUT = "actor_rollout_ref.rollout"
SPEC = CorrectionSpec.from_mapping({"weight": TIS})
SGLANG, TORCH = "SGLANG_RETURN_ORIGINAL_LOGPROB", "TLLM_USE_TORCHSAMPLER"
WORKERS = "ray_kwargs.ray_init.runtime_env.env_vars"
SAMPLER = f"{ROLLOUT}.engine_kwargs.trtllm.sampler_type"
RAW: dict[str, Any] = {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}


def configuration(engine: str, temperature: float, changes: dict[str, Any]) -> DictConfig:
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": engine, "temperature": temperature}}})
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


@pytest.mark.parametrize(
    ("engine", "temperature", "changes", "environment", "refused"),
    [
        # vLLM's key means nothing to the others, nor theirs to it.
        ("vllm", 0.7, RAW, {SGLANG: "1", TORCH: "1"}, [f"{ROLLOUT}.logprobs_mode"]),
        ("sglang", 0.7, RAW, {TORCH: "1"}, []),
        ("trtllm", 0.7, RAW, {SGLANG: "true"}, []),
        ("sglang", 0.7, {}, {SGLANG: "true"}, [SGLANG]),
        ("sglang", 0.7, {}, {SGLANG: "0"}, []),
        ("sglang", 1.0, {}, {SGLANG: "1"}, []),
        ("sglang", 0.7, {f"{WORKERS}.{SGLANG}": "1"}, {}, [f"{WORKERS}.{SGLANG}"]),
        ("trtllm", 0.7, {}, {TORCH: "1"}, [TORCH]),
        ("trtllm", 0.7, {}, {TORCH: "0"}, []),
        ("trtllm", 1.0, {SAMPLER: "TorchSampler"}, {TORCH: "1"}, []),
        ("trtllm", 0.7, {SAMPLER: "TorchSampler"}, {}, [SAMPLER]),
        ("trtllm", 0.7, {SAMPLER: "auto"}, {}, [SAMPLER]),
        ("trtllm", 0.7, {SAMPLER: "TRTLLMSampler"}, {}, []),
    ],
)
def test_raw_log_probs_are_refused_by_engine(
    engine: str,
    temperature: float,
    changes: dict[str, Any],
    environment: dict[str, str],
    refused: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (SGLANG, TORCH):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = configuration(engine, temperature, changes)
    found = list(check_logprobs_mode(Composed(config, SPEC)))
    assert [problem.key for problem in found] == refused
    for problem in found:
        monkeypatch.delenv(problem.key, raising=False)
        for override in problem.overrides:
            if override.startswith("~"):
                owner, _, name = override[1:].rpartition(".")
                del OmegaConf.select(config, owner)[name]
            else:
                key, _, value = override.partition("=")
                OmegaConf.update(config, key, value)
    assert list(check_logprobs_mode(Composed(config, SPEC))) == []
