"""What ``offpolicy.staleness.eta`` needs and replaces: each refusal by itself, with an override that mends it."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.checks import staleness
from recipe.offpolicy.preflight.checks.staleness import (
    ASYNC_MODES,
    REPLACED,
    SAMPLER,
    check_staleness,
    is_asynchronous,
    is_bounded,
    notes_token_versions,
)
from recipe.offpolicy.staleness.staleness_settings import ETA
from verl_patches.execution_path import LivePath, live_path
from verl_patches.releases import V1_MODES

USUAL = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop"}


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are asked of 0.9.1, whichever is installed."""
    monkeypatch.setattr(staleness, "live_path", lambda config: live_path(config, "0.9.1"))


def config(mode: str = "separate_async", **changes: Any) -> DictConfig:
    v1 = {"trainer_mode": mode, "sampler": dict(USUAL), mode: {"num_warmup_batches": 1}}
    made = OmegaConf.create(
        {
            "trainer": {"use_v1": True, "v1": v1},
            "actor_rollout_ref": {"actor": {"strategy": "fsdp"}},
            "offpolicy": {"staleness": {"eta": 2}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(made, key, value, force_add=True)
    return made


def problems(made: DictConfig) -> list[Any]:
    return list(check_staleness(made, CorrectionSpec()))


@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_both_asynchronous_modes_are_covered(mode: str) -> None:
    assert problems(config(mode)) == []
    assert problems(config(mode, **{f"trainer.v1.{mode}.num_warmup_batches": None})) == []
    assert set(ASYNC_MODES) == set(V1_MODES) - {"sync"}


def test_without_eta_nothing_is_asked() -> None:
    made = config("sync", **{ETA: None, "trainer.use_v1": False, "skip.rollout_tq.enable": True})
    assert not is_bounded(made)
    assert problems(made) == []


@pytest.mark.parametrize(("release", "noted"), [("0.9.1", True), ("0.9.0", False)])
def test_versions_are_noted_by_token_in_asynchronous_modes(
    release: str, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness, "live_path", lambda config: live_path(config, release))
    for mode in V1_MODES:
        made = config(mode)
        assert is_asynchronous(made) is (mode != "sync")
        assert notes_token_versions(made) is (noted and mode != "sync")
    assert not is_asynchronous(config(**{"trainer.use_v1": False}))


CUSTOM = {f"{SAMPLER}.custom_sampler": {"path": "own.py", "name": "Own"}}


@pytest.mark.parametrize(
    ("mode", "changes", "key", "reason"),
    [
        ("sync", {}, ETA, "by the weights in force"),
        ("separate_async", {"trainer.use_v1": False}, ETA, "the V0 trainer"),
        ("separate_async", {"trainer.v1.separate_async.num_warmup_batches": 2}, None, "takes its place"),
        ("colocate_async", {"trainer.v1.colocate_async.num_warmup_batches": 0}, None, "takes its place"),
        ("separate_async", {f"{SAMPLER}.max_off_policy_threshold": 4}, None, "takes its place"),
        ("separate_async", {f"{SAMPLER}.max_off_policy_strategy": "wait"}, None, "takes its place"),
        ("separate_async", CUSTOM, f"{SAMPLER}.custom_sampler.name", "would not be built"),
        ("separate_async", {"skip.rollout_tq.enable": True}, None, "past the limit"),
    ],
)
def test_what_eta_cannot_govern_is_refused_and_mended(
    mode: str, changes: dict[str, Any], key: str | None, reason: str
) -> None:
    made = config(mode, **changes)
    (problem,) = problems(made)
    assert problem.key == (key or next(iter(changes)))
    assert problem.verdict == "WRONG"
    assert reason in problem.reason
    for override in problem.overrides:
        name, _, value = override.partition("=")
        OmegaConf.update(made, name, OmegaConf.create(f"value: {value}").value)
    assert problems(made) == []


@pytest.mark.parametrize("release", ["0.7.1", "0.8.0", "0.9.0"])
def test_a_release_that_issues_prompts_otherwise_is_refused(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "live_path", lambda config: LivePath(release, "v1", "engine", "fsdp"))
    (problem,) = problems(config("colocate_async"))
    assert problem.key == ETA
    assert f"verl {release} does not issue prompts" in problem.reason
    assert problem.overrides == (f"{ETA}=null",)


@pytest.mark.verl("==0.9.1")
def test_values_that_mean_unset_are_verls_own() -> None:
    from pathlib import Path

    import verl

    shipped = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "ppo_trainer.yaml")
    for name, usual in REPLACED.items():
        for key in [name] if "." in name else [f"trainer.v1.{mode}.{name}" for mode in ASYNC_MODES]:
            assert OmegaConf.select(shipped, key) == usual
