"""Keys that verl reads late are rejected before a launch: choices, checkpoints, folders, numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, Problem
from recipe.offpolicy.preflight.checks import run_keys
from recipe.offpolicy.preflight.checks.path import _find_nearest_mode
from recipe.offpolicy.preflight.checks.rollout import check_logprobs_mode
from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import changed
from tests.support.corrections import TIS
from tests.support.overridden import with_overrides

NONE = CorrectionSpec()
ROLLOUT = "actor_rollout_ref.rollout"
V1_MODES = ("sync", "colocate_async", "separate_async")


def found(check: Any, values: dict[str, Any]) -> dict[str, Problem]:
    config = changed(OmegaConf.create({}), values)
    return {problem.key: problem for problem in check(Composed(config, NONE))}


def test_a_checkpoint_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (there := tmp_path / "global_step_5").mkdir()

    def key(mode: str, path: object) -> dict[str, str]:
        values = {"trainer.resume_mode": mode, "trainer.resume_from_path": path}
        return {name: problem.verdict for name, problem in found(run_keys.check_resume, values).items()}

    wrong = {"trainer.resume_from_path": "ERROR"}
    assert key("resume_path", str(there)) == {}
    assert key("resume_path", None) == wrong
    assert key("resume_path", str(tmp_path)) == wrong
    assert key("resume_path", str(tmp_path / "global_step_6")) == wrong
    assert key("resume_path", "hdfs://there/global_step_6") == {}
    assert key("auto", None) == {}
    assert key("auto", str(there)) == {"trainer.resume_from_path": "NOTE"}


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (file := tmp_path / "file").touch()
    for key in ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"):
        good = {"trainer.default_local_dir": str(tmp_path / "new" / "below")}
        assert found(run_keys.check_folders, good) == {}
        for value in (str(file / "below"), "", 5, "/proc/none"):
            assert key in found(run_keys.check_folders, {**good, key: value}), value
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "a look leaves nothing behind"
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")  # whose nodes have other folders
    assert found(run_keys.check_folders, {"trainer.default_local_dir": str(file / "below")}) == {}


@pytest.mark.parametrize(
    "value",
    [
        1e308,
        2**63,
        -(10**400),
    ],
)
def test_numbers_beyond_float32_and_64_bits(value: object) -> None:
    assert len(found(run_keys.check_numbers, {"correction.penalty.coefficient": value})) == 1
    assert found(run_keys.check_numbers, {"a.b": 1e29, "c": 2**62, "d": float("inf"), "e": True}) == {}


@pytest.mark.parametrize(
    ("given", "covered", "nearest"),
    [
        ("fully_async", V1_MODES, "separate_async"),
        ("seperate_async", V1_MODES, "separate_async"),
        ("separate_async", ("sync", "colocate_async"), "colocate_async"),
    ],
)
def test_an_asynchronous_mode_is_never_replaced_by_sync(given: str, covered: tuple[str, ...], nearest: str) -> None:
    assert _find_nearest_mode(given, covered) == nearest


# Log-probs before the temperature are refused by what each rollout engine itself reads


SPEC = CorrectionSpec.from_mapping({"weight": TIS})
SGLANG, TORCH = "SGLANG_RETURN_ORIGINAL_LOGPROB", "TLLM_USE_TORCHSAMPLER"
WORKERS = "ray_kwargs.ray_init.runtime_env.env_vars"
SAMPLER = f"{ROLLOUT}.engine_kwargs.trtllm.sampler_type"
RAW: dict[str, Any] = {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}


@pytest.mark.parametrize(
    ("engine", "temperature", "changes", "environment", "refused"),
    [
        # vLLM's key means nothing to the others, nor theirs to it.
        ("vllm", 0.7, RAW, {SGLANG: "1", TORCH: "1"}, [f"{ROLLOUT}.logprobs_mode"]),
        ("sglang", 0.7, RAW, {TORCH: "1"}, []),
        ("sglang", 0.7, {}, {SGLANG: "true"}, [SGLANG]),
        ("sglang", 0.7, {f"{WORKERS}.{SGLANG}": "1"}, {}, [f"{WORKERS}.{SGLANG}"]),
        ("trtllm", 1.0, {SAMPLER: "TorchSampler"}, {TORCH: "1"}, []),
        ("trtllm", 0.7, {SAMPLER: "auto"}, {}, [SAMPLER]),
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
    rollout = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": engine, "temperature": temperature}}})
    config = changed(rollout, changes)
    found = list(check_logprobs_mode(Composed(config, SPEC)))
    assert [problem.key for problem in found] == refused
    for problem in found:
        monkeypatch.delenv(problem.key, raising=False)
    fixed = with_overrides(config, [override for problem in found for override in problem.overrides])
    assert list(check_logprobs_mode(Composed(fixed, SPEC))) == []
