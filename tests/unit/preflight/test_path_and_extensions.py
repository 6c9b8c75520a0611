"""Paths that the correction does not cover, and needs of extensions together."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.registry import KEY
from recipe.offpolicy.preflight.checks.coverage import find_uncovered
from recipe.offpolicy.preflight.checks.extensions import check_extensions, warn_extensions
from tests.support.nudge import Nudge
from verl_patches.execution_path import LivePath

MU = "actor_rollout_ref.rollout.calculate_log_probs"


class Estimating(Nudge):
    """Computes advantages in the place of verl's estimator."""

    def estimate(self, batch: object, rewards: object) -> None:
        return None


def config(**changes: Any) -> DictConfig:
    values = {
        "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
        "actor_rollout_ref": {"model": {"use_remove_padding": True}, "rollout": {"calculate_log_probs": True}},
        "offpolicy": {"extensions": None},
    }
    made = OmegaConf.create(values)
    for key, value in changes.items():
        OmegaConf.update(made, key, value, merge=False, force_add=True)
    return made


V1 = LivePath("0.9.1", "v1", "engine", "fsdp2")
OLD = LivePath("0.8.0", "v0", "engine", "fsdp2")
LEGACY = LivePath("0.7.1", "v0", "legacy", "fsdp")


@pytest.mark.parametrize(
    ("path", "changes", "keys"),
    [
        (V1, {}, []),
        (LEGACY, {"trainer.use_v1": False}, []),
        (V1, {"trainer.v1.trainer_mode": "other"}, ["trainer.v1.trainer_mode"]),
        (LivePath("0.9.1", "v1", "engine", "veomni"), {}, ["actor_rollout_ref.actor.strategy"]),
        (OLD, {}, ["trainer.use_v1"]),
        (V1, {"trainer.use_legacy_worker_impl": "enable"}, ["trainer.use_legacy_worker_impl"]),
        (
            LEGACY,
            {"trainer.use_v1": False, "actor_rollout_ref.actor.use_prefix_grouper": True},
            ["actor_rollout_ref.actor.use_prefix_grouper"],
        ),
    ],
)
def test_what_is_not_covered_of_a_path(path: LivePath, changes: dict[str, Any], keys: list[str]) -> None:
    assert [problem.key for problem in find_uncovered(config(**changes), path)] == keys


def extended(target: str, *, mu: bool = True, **settings: Any) -> DictConfig:
    sections = {"one": target, "two": target}
    return config(**{KEY: sections, MU: mu, "one": {"bonus": 1.0, **settings}, "two": {"bonus": 1.0}})


def test_extensions_that_act_on_the_loss_need_mu() -> None:
    nudge = "tests.support.nudge:Nudge"
    assert list(check_extensions(extended(nudge), CorrectionSpec())) == []
    (problem,) = check_extensions(extended(nudge, mu=False), CorrectionSpec())
    assert (problem.key, problem.parts) == (MU, ("one", "two"))


def test_one_extension_at_most_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.nudge.Nudge", Estimating)
    (problem,) = check_extensions(extended("tests.support.nudge:Nudge"), CorrectionSpec())
    assert problem.key == "two"
    assert "so does one" in problem.reason


def test_problems_that_stop_nothing_are_remarks() -> None:
    shapeless = extended("tests.support.nudge:Nudge", bonus=0.0, tilt=0)
    assert [problem.key for problem in warn_extensions(shapeless, CorrectionSpec())] == ["one.tilt"]
    assert list(check_extensions(shapeless, CorrectionSpec())) == []
