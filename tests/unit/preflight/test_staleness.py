"""What ``offpolicy.staleness.eta`` needs and replaces: each refusal by itself, with an override that mends it."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.checks import CHECKS, REMARKS, staleness
from recipe.offpolicy.preflight.checks.staleness import (
    ASYNC_MODES,
    REPLACED,
    SAMPLER,
    check_ages,
    check_staleness,
    is_asynchronous,
    is_bounded,
    notes_token_versions,
    warn_ages,
    warn_uncorrected,
    warn_verls_limit,
)
from recipe.offpolicy.staleness.staleness_settings import ETA
from tests.support.corrections import TIS, spec
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
    assert problem.verdict == "ERROR"
    assert reason in problem.reason
    # Either side was asked for.
    assert problem.overrides == ()
    assert f"{ETA}=null" in problem.fix


def test_a_target_of_the_weights_needs_a_weight() -> None:
    made = config(**{"offpolicy.staleness.adapt": {"ess": 0.9}})
    (problem,) = problems(made)
    assert (problem.key, problem.verdict) == ("offpolicy.staleness.adapt.ess", "ERROR")
    assert "the correction has none" in problem.reason
    assert problem.overrides == ()
    assert "or set offpolicy.staleness.adapt.ess=null" in problem.fix
    assert list(check_staleness(made, spec(TIS))) == []


# verl's own keys ------------------------------------------------------------------------------------------------

WARMUP, THRESHOLD, STRATEGY = (
    "trainer.v1.separate_async.num_warmup_batches",
    f"{SAMPLER}.max_off_policy_threshold",
    f"{SAMPLER}.max_off_policy_strategy",
)


def remarks(made: DictConfig) -> list[Any]:
    return list(warn_verls_limit(made, CorrectionSpec()))


@pytest.mark.parametrize(
    ("strategy", "ahead", "threshold", "verdict", "said"),
    [
        ("wait", 8, 5, "NO-OP", "finished groups are trained at age 8, and the threshold admits 4"),
        ("wait", 4.5, 5, "NO-OP", "finished groups are trained at age 5, and the threshold admits 4"),
        # 1 - 5/9, as measured: 224 of the first 608 prompts, of which the first are young.
        ("drop", 8, 5, "NOTE", "throws away 44% of all rollouts: groups come 8 versions after"),
        ("drop", 1, 1, "NOTE", "throws away 50% of all rollouts"),
    ],
)
def test_verls_own_limit_that_bounds_nothing_or_discards_is_said_and_mended(
    strategy: str, ahead: float, threshold: int, verdict: str, said: str
) -> None:
    made = config(**{ETA: None, WARMUP: ahead, THRESHOLD: threshold, STRATEGY: strategy})
    (problem,) = remarks(made)
    assert (problem.key, problem.value, problem.verdict) == (STRATEGY, strategy, verdict)
    assert said in problem.reason
    assert f"or {ETA}={threshold - 1} in the place of all three" in problem.fix
    assert problem.overrides == (f"{WARMUP}={threshold - 1}",)
    made.merge_with_dotlist(list(problem.overrides))
    assert remarks(made) == []


def test_without_a_threshold_no_age_is_looked_at() -> None:
    (problem,) = remarks(config(**{ETA: None, WARMUP: 2, THRESHOLD: None}))
    assert (problem.key, problem.verdict) == (THRESHOLD, "NOTE")
    assert "groups are trained 2 versions after their issue" in problem.reason
    assert remarks(config(**{ETA: 2, THRESHOLD: None})) == []
    assert remarks(config("sync", **{ETA: None, THRESHOLD: None})) == []


@pytest.mark.parametrize("strategy", ["wait", "drop"])
def test_verls_own_limit_that_holds_is_left_alone(strategy: str) -> None:
    assert remarks(config(**{ETA: None, WARMUP: 4, THRESHOLD: 5, STRATEGY: strategy})) == []
    assert remarks(config(**{ETA: None, WARMUP: None, THRESHOLD: 1, STRATEGY: strategy})) == []


def test_asynchronous_training_without_a_correction_is_said() -> None:
    made = config()
    (problem,) = warn_uncorrected(made, CorrectionSpec())
    assert (problem.key, problem.value, problem.verdict) == ("trainer.v1.trainer_mode", "separate_async", "NOTE")
    assert list(warn_uncorrected(made, spec(TIS))) == list(warn_uncorrected(config("sync"), CorrectionSpec())) == []
    of_verl = config(**{"algorithm.rollout_correction": {"rollout_is": "token"}})
    assert list(warn_uncorrected(of_verl, CorrectionSpec())) == []


@pytest.mark.parametrize("release", ["0.7.1", "0.8.0", "0.9.0"])
def test_a_release_that_issues_prompts_otherwise_is_refused(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "live_path", lambda config: LivePath(release, "v1", "engine", "fsdp"))
    (problem,) = problems(config("colocate_async"))
    assert problem.key == ETA
    assert f"verl {release} does not issue prompts" in problem.reason
    assert problem.overrides == ()
    assert f"verl 0.9.1, or set {ETA}=null" in problem.fix


@pytest.mark.verl("==0.9.1")
def test_values_that_mean_unset_are_verls_own() -> None:
    from pathlib import Path

    import verl

    shipped = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "ppo_trainer.yaml")
    for name, usual in REPLACED.items():
        for key in [name] if "." in name else [f"trainer.v1.{mode}.{name}" for mode in ASYNC_MODES]:
            assert OmegaConf.select(shipped, key) == usual


# What goes by age -------------------------------------------------------------------------------------------

STALE: dict[str, Any] = {"aggregate": "staleness", "level": "token", "upper": 1}


def by_age(**changes: Any) -> CorrectionSpec:
    return spec(TIS | {"by_staleness": [1.0, 1.5]}, stale=STALE | changes)


@pytest.mark.parametrize("mode", V1_MODES)
def test_ages_are_known_in_every_mode_of_0_9_1(mode: str) -> None:
    assert list(check_ages(config(mode), by_age())) == []
    assert list(check_ages(config(mode, **{"trainer.use_v1": False}), by_age())) == []


def test_a_release_that_notes_no_versions_is_refused_and_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "live_path", lambda config: LivePath("0.7.1", "v0", "engine", "fsdp"))
    made = config(
        **{"trainer.use_v1": False, "offpolicy.shadow": {"old": by_age().to_mapping(), "tis": {"weight": TIS}}}
    )
    found = {problem.key: problem for problem in check_ages(made, by_age())}
    assert {key: problem.overrides for key, problem in found.items()} == {
        "correction.masks.stale.aggregate": (),
        "correction.weight.by_staleness": (),
        "offpolicy.shadow": (),
    }
    assert {problem.verdict for problem in found.values()} == {"ERROR"}
    assert all("verl 0.7.1 does not note which version" in problem.reason for problem in found.values())


def test_where_versions_are_known_by_row_ages_are_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "live_path", lambda config: LivePath("0.9.0", "v1", "engine", "fsdp"))
    made = config("colocate_async")
    stale, weight = check_ages(made, by_age())
    assert (stale.key, stale.value, stale.overrides) == (
        "correction.masks.stale.level",
        "token",
        ("correction.masks.stale.level=sequence",),
    )
    assert weight.overrides == ()
    assert list(check_ages(made, spec(stale=STALE | {"level": "sequence"}))) == []
    assert list(check_ages(config("sync"), by_age())) == []


@pytest.mark.parametrize(
    ("mode", "eta", "upper", "inert"),
    [
        ("separate_async", 2, 1, False),
        ("separate_async", 2, 2, True),
        ("separate_async", 1.5, 2, True),
        ("separate_async", 1.5, 1, False),
        ("colocate_async", 0, 0, True),
        ("separate_async", None, 9, False),
        ("sync", None, 0, True),
    ],
)
def test_a_mask_that_no_age_reaches_is_inert(mode: str, eta: float | None, upper: int, inert: bool) -> None:
    found = list(warn_ages(config(mode, **{ETA: eta}), spec(stale=STALE | {"upper": upper})))
    assert [(problem.key, problem.verdict) for problem in found] == [("correction.masks.stale.upper", "NO-OP")] * inert
    if inert:
        assert found[0].beside == ({ETA: eta} if eta is not None else {})
        assert found[0].overrides == ()
        assert ("correction.masks.stale.upper=1" in found[0].fix) == (upper == 2)


@pytest.mark.parametrize(
    ("mode", "eta", "inert"),
    [
        ("sync", None, True),
        ("separate_async", 1, True),
        ("separate_async", 1.5, False),
        ("separate_async", None, False),
    ],
)
def test_interpolation_by_age_needs_an_age_of_2(mode: str, eta: float | None, inert: bool) -> None:
    correction = CorrectionSpec.from_mapping({"proximal": "loglinear", "alpha": "by_age"})
    found = list(warn_ages(config(mode, **{ETA: eta}), correction))
    assert [(each.key, each.verdict) for each in found] == [("correction.alpha", "NO-OP")] * inert


@pytest.mark.parametrize(
    ("mode", "eta", "factors", "inert"),
    [
        ("separate_async", 2, [1.0], True),
        ("separate_async", None, [1.0, 1.0], True),
        ("separate_async", None, [1.0, 1.0, 2.0], False),
        ("separate_async", 1, [1.0, 1.0, 2.0], True),
        ("separate_async", 2, [1.0, 1.0, 2.0], False),
        ("sync", None, [1.0, 2.0], True),
        ("sync", None, [2.0], False),
    ],
)
def test_factors_that_change_no_bound_are_inert(
    mode: str, eta: float | None, factors: list[float], inert: bool
) -> None:
    found = list(warn_ages(config(mode, **{ETA: eta}), spec(TIS | {"by_staleness": factors})))
    key = "correction.weight.by_staleness"
    assert [(each.key, each.verdict, each.overrides) for each in found] == [(key, "NO-OP", ())] * inert


def test_both_are_asked_at_every_launch() -> None:
    assert check_ages in CHECKS
    assert warn_ages in REMARKS
