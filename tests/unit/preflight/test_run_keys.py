"""Keys that verl reads late are refused before a launch: choices, checkpoints, folders, numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, Problem
from recipe.offpolicy.preflight.checks import run_keys
from recipe.offpolicy.preflight.checks.coverage import _find_nearest_mode
from recipe.offpolicy.preflight.checks.not_shown import warn_not_shown
from tests.support.corrections import TIS, spec

NONE = CorrectionSpec()
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
V1_MODES = ("sync", "colocate_async", "separate_async")


def found(check: Any, values: dict[str, Any], of: CorrectionSpec = NONE) -> dict[str, Problem]:
    config = OmegaConf.create({})
    for key, value in values.items():
        OmegaConf.update(config, key, value, force_add=True)
    return {problem.key: problem for problem in check(config, of)}


@pytest.mark.parametrize(
    ("key", "value", "mended"),
    [
        ("trainer.resume_mode", "sometimes", "trainer.resume_mode=auto"),
        ("trainer.resume_mode", "resume-path", "trainer.resume_mode=resume_path"),
        ("trainer.resume_mode", None, "trainer.resume_mode=auto"),
        ("algorithm.adv_estimator", "GRPO_", "algorithm.adv_estimator=grpo"),
        ("algorithm.kl_ctrl.type", "adaptiv", "algorithm.kl_ctrl.type=adaptive"),
        (f"{ACTOR}.kl_loss_type", "low_var", f"{ACTOR}.kl_loss_type=low_var_kl"),
        ("data.truncation", "rigth", "data.truncation=right"),
        ("algorithm.adv_estimator", "elliptical", None),
        (f"{ACTOR}.kl_loss_type", "hellinger", None),
    ],
)
def test_a_choice_that_verl_does_not_have(
    key: str, value: object, mended: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    problem = found(run_keys.check_choices, {key: value})[key]
    assert problem.verdict == "ERROR"
    assert problem.overrides == ((mended,) if mended else ())


def test_a_logger_that_verl_does_not_have() -> None:
    pytest.importorskip("verl")
    problem = found(run_keys.check_choices, {"trainer.logger": ["consol", "wandb"]})["trainer.logger"]
    assert problem.overrides == ("trainer.logger=[console, wandb]",)
    assert found(run_keys.check_choices, {"trainer.logger": ["console", "file"]}) == {}
    assert found(run_keys.check_choices, {"trainer.logger": "console"}) == {}


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


@pytest.mark.parametrize("value", [1e308, -1e31, 2**63, -(10**400), [1.0, 1e300]])
def test_numbers_beyond_float32_and_64_bits(value: object) -> None:
    assert len(found(run_keys.check_numbers, {"correction.penalty.coefficient": value})) == 1
    assert found(run_keys.check_numbers, {"a.b": 1e29, "c": 2**62, "d": float("inf"), "e": True}) == {}


@pytest.mark.parametrize("value", [None, "", "???"])
def test_a_rollout_engine_is_named(value: object) -> None:
    assert found(run_keys.check_engine_is_named, {f"{ROLLOUT}.name": value})[f"{ROLLOUT}.name"].overrides == (
        f"{ROLLOUT}.name=vllm",
    )
    assert found(run_keys.check_engine_is_named, {f"{ROLLOUT}.name": "vllm"}) == {}


@pytest.mark.parametrize(
    ("given", "covered", "nearest"),
    [
        ("fully_async", V1_MODES, "separate_async"),
        ("one_step_off_policy", V1_MODES, "separate_async"),
        ("seperate_async", V1_MODES, "separate_async"),
        ("colocated_async", V1_MODES, "colocate_async"),
        ("async", V1_MODES, "separate_async"),
        ("separate_async", ("sync", "colocate_async"), "colocate_async"),
        ("synch", V1_MODES, "sync"),
    ],
)
def test_an_asynchronous_mode_is_never_replaced_by_sync(given: str, covered: tuple[str, ...], nearest: str) -> None:
    assert _find_nearest_mode(given, covered) == nearest


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.device", "npu"),
        ("algorithm.adv_estimator", "optimal_token_baseline"),
        (f"{ACTOR}.megatron.context_parallel_size", 2),
        (f"{ACTOR}.ulysses_sequence_parallel_size", 4),
        ("actor_rollout_ref.model.use_fused_kernels", True),
        ("actor_rollout_ref.model.lora_rank", 32),
        (f"{ROLLOUT}.quantization", "fp8"),
        (f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype", "fp8_e5m2"),
        (f"{ROLLOUT}.expert_parallel_size", 8),
    ],
)
def test_what_no_correction_was_run_with_is_noted(key: str, value: object) -> None:
    pytest.importorskip("verl")
    plain = {f"{ACTOR}.strategy": "fsdp2", "trainer.device": "cuda", "algorithm.adv_estimator": "grpo"}
    plain["trainer.v1.trainer_mode"] = "sync"
    problems = found(warn_not_shown, {**plain, key: value}, spec(TIS))
    assert {name: problem.verdict for name, problem in problems.items()} == {key: "NOTE"}
    assert found(warn_not_shown, plain, spec(TIS)) == {}
