"""Checks that read verl's own configuration or code: each by itself, on what it passes and what it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.preflight.checks import seams, staleness
from recipe.offpolicy.preflight.checks.coverage import check_path
from recipe.offpolicy.preflight.checks.offpolicy_keys import check_own_keys
from recipe.offpolicy.preflight.checks.policy_loss import check_base_loss, check_base_loss_of_verl
from recipe.offpolicy.preflight.checks.seams import check_seams, check_version_level
from recipe.offpolicy.preflight.checks.verl_rollout_correction import check_dead_keys
from recipe.offpolicy.preflight.checks.verl_validate_config import check_by_verl
from recipe.offpolicy.preflight.checks.warnings import warn_level_version
from recipe.offpolicy.preflight.checks.workers_env import KEY, check_workers_env
from recipe.offpolicy.preflight.hydra_groups import compose_without
from recipe.offpolicy.preflight.shadows import check_beside
from tests.support.applications import NEEDED, application, changed
from tests.support.corrections import GSM, TIS, band, spec
from verl_patches.contract import PatchError
from verl_patches.execution_path import LivePath

pytest.importorskip("verl")
pytestmark = pytest.mark.verl(">=0.9")

BOTH, NONE = spec(TIS, gsm=GSM), CorrectionSpec()
BY_VERSION = spec(TIS | {"level": "version"})
ACTOR, VERL = "actor_rollout_ref.actor", "algorithm.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
MODE = "trainer.v1.trainer_mode"


@pytest.fixture(scope="module")
def composed() -> Iterator[DictConfig]:
    with application("correction=[tis_token,gsm]", *NEEDED) as config:
        yield config


CASES: list[tuple[Any, dict[str, Any], CorrectionSpec, str]] = [
    (check_base_loss, {LOSS_MODE: "geo_mean"}, BOTH, LOSS_MODE),
    (check_base_loss_of_verl, {LOSS_MODE: "geo_mean", f"{VERL}.rollout_is": "token"}, NONE, LOSS_MODE),
    (check_by_verl, {f"{ACTOR}.ppo_mini_batch_size": 4096}, BOTH, f"{ACTOR}.ppo_mini_batch_size"),
    (check_own_keys, {"offpolicy.recrod": {"dir": "/tmp"}}, BOTH, "offpolicy.recrod"),
    (check_path, {MODE: "fully_async"}, BOTH, MODE),
    (check_workers_env, {KEY: "cpu"}, BOTH, KEY),
]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "changes", "correction", "key"), CASES, ids=[case[0].__name__ for case in CASES])
def test_what_a_check_names(
    composed: DictConfig, check: Any, changes: dict[str, Any], correction: CorrectionSpec, key: str
) -> None:
    assert [problem.key for problem in check(changed(composed, changes), correction)] == [key]
    assert list(check(composed, correction)) == []


@pytest.mark.parametrize(("release", "modes"), [("0.9.1", ()), ("0.9.0", ("colocate_async",))])
def test_versions_that_a_release_does_not_note_by_token(
    composed: DictConfig, release: str, modes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (seams, staleness):
        monkeypatch.setattr(module, "live_path", lambda config: LivePath(release, "v1", "engine", "fsdp"))
    for mode in ("sync", "colocate_async"):
        found = list(check_version_level(changed(composed, {MODE: mode}), BY_VERSION))
        assert [problem.key for problem in found] == ["correction.weight.level"] * (mode in modes)
        assert all(problem.overrides == ("correction.weight.level=sequence",) for problem in found)
        assert all("which token by which was not shown with 0.9.0" in problem.reason for problem in found)


def test_versions_are_told_from_rows_in_asynchronous_training(composed: DictConfig) -> None:
    assert list(warn_level_version(composed, BY_VERSION))
    assert list(warn_level_version(changed(composed, {MODE: "separate_async"}), BY_VERSION)) == []


def test_keys_of_verls_own_correction_that_nothing_reads(composed: DictConfig) -> None:
    assert list(check_dead_keys(composed, NONE)) == []
    dead = changed(composed, {f"{VERL}.bypass_mode": True, f"{VERL}.loss_type": "reinforce"})
    assert [problem.key for problem in check_dead_keys(dead, NONE)] == [f"{VERL}.loss_type"]


@pytest.mark.slow
def test_a_seam_that_has_moved_is_named(composed: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_seams(composed, BOTH)) == []

    def moved() -> None:
        raise PatchError("patch 'trainer': verl.trainer has moved. Fix: install verl 0.9.1.")

    monkeypatch.setattr("recipe.offpolicy.preflight.checks.seams.verl_patches.status", moved)
    (problem,) = check_seams(composed, BOTH)
    assert "has moved" in problem.cause


def test_a_shadow_has_to_fit_the_runs_pi_old() -> None:
    """Where pi_old is mu, pi_old / mu is 1 and a mask on it never acts."""
    check_beside(BOTH, {"gsm": spec(None, gsm=band(0.9, 1.1))})
    bypassed = CorrectionSpec.from_mapping({"proximal": "bypass"})
    with pytest.raises(SpecError, match="tis"):
        check_beside(bypassed, {"tis": spec(TIS)})


@pytest.mark.slow
def test_a_composition_without_some_of_its_overrides() -> None:
    with application("correction=[tis_token,gsm]", *NEEDED) as config:
        without = compose_without(["correction=[tis_token,gsm]"])
    assert list(config.correction.masks) == ["gsm"]
    assert not without.correction.masks
    assert without.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 1
