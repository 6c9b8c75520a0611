"""The keys ``offpolicy.staleness``: read, and refused with a value that mends them."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.batch.shipped_defaults import read_shipped_defaults
from recipe.offpolicy.staleness.controller import AdaptSettings
from recipe.offpolicy.staleness.staleness_settings import StalenessSettings, find_problems
from tests.support.mended import with_overrides


def config(**changes: Any) -> DictConfig:
    shipped = read_shipped_defaults("staleness")
    if isinstance(adapt := changes.get("adapt"), dict):
        changes["adapt"] = shipped["adapt"] | adapt
    return OmegaConf.create({"offpolicy": {"staleness": shipped | changes}})


def test_as_shipped_nothing_is_bounded() -> None:
    assert StalenessSettings.from_config(config()) is None
    assert StalenessSettings.from_config(OmegaConf.create({})) is None
    assert list(find_problems(config())) == list(find_problems(OmegaConf.create({}))) == []


def test_the_section_is_read() -> None:
    assert StalenessSettings.from_config(config(eta=0.5)) == StalenessSettings(0.5, "wait", 2, None)
    given = config(eta=2, too_old="refresh", refresh_limit=1)
    assert StalenessSettings.from_config(given) == StalenessSettings(2, "refresh", 1, None)
    assert [StalenessSettings.at(1, too_old=each).masks for each in ("wait", "mask", "refresh", "drop")] == [
        *(False, True, True, False)
    ]
    adaptive = config(eta=1, too_old="refresh", adapt={"ess": 0.9, "ceiling": 4})
    settings = StalenessSettings.from_config(adaptive)
    assert settings is not None
    assert settings.adapt == AdaptSettings(ess=0.9, trainer_wait=0.05, floor=0, ceiling=4, every=4, patience=2, step=1)
    assert settings.oldest_age == 4
    assert StalenessSettings.at(0.5).oldest_age == 1
    assert list(find_problems(adaptive)) == []
    assert list(find_problems(given)) == list(find_problems(config(eta=0, too_old="mask"))) == []


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"eta": -1}, "eta", "expected a number of batches"),
        ({"eta": "2"}, "eta", "expected a number of batches"),
        ({"eta": True}, "eta", "expected a number of batches"),
        ({"eta": float("nan")}, "eta", "expected a number of batches"),
        ({"eta": float("inf")}, "eta", "expected a number of batches"),
        ({"eta": 1, "too_old": "abort"}, "too_old", "expected one of [wait,mask,refresh,drop]"),
        ({"eta": 1, "too_old": "refresh", "refresh_limit": 0}, "refresh_limit", "1 or more"),
        ({"eta": 1, "too_old": "refresh", "refresh_limit": 1.5}, "refresh_limit", "1 or more"),
        ({"too_old": "mask"}, "too_old", "read with offpolicy.staleness.eta alone"),
        ({"eta": 0, "too_old": "drop"}, "too_old", "none becomes too old"),
        ({"eta": 0, "too_old": "refresh"}, "too_old", "none becomes too old"),
        ({"eta": 1, "refresh_limit": 3}, "refresh_limit", "read with too_old=refresh alone"),
        ({"etta": 2}, "etta", "unknown key"),
        ({"adapt": 2}, "adapt", "expected its keys"),
        ({"eta": 0, "adapt": {"ess": 0.0}}, "adapt.ess", "expected a share above 0"),
        ({"eta": 0, "adapt": {"ess": 1.5}}, "adapt.ess", "expected a share above 0"),
        ({"eta": 0, "adapt": {"ess": 0.9, "every": 0}}, "adapt.every", "1 or more"),
        ({"eta": 0, "adapt": {"ess": 0.9, "step": 0}}, "adapt.step", "above 0"),
        ({"eta": 0, "adapt": {"ess": 0.9, "trainer_wait": 1}}, "adapt.trainer_wait", "below 1"),
        ({"eta": 1, "adapt": {"ess": 0.9, "floors": 1}}, "adapt.floors", "unknown key"),
        ({"eta": 0, "adapt": {"ceiling": 4}}, "adapt.ceiling", "read with offpolicy.staleness.adapt.ess alone"),
        ({"adapt": {"ess": 0.9}}, "eta", "null leaves"),
        ({"eta": 1, "adapt": {"ess": 0.9, "floor": 2, "ceiling": 1}}, "adapt.floor", "above the ceiling"),
        ({"eta": 9, "adapt": {"ess": 0.9}}, "eta", "begins outside of adapt.floor and adapt.ceiling"),
        ({"eta": 0, "too_old": "drop", "adapt": {"ess": 0.9}}, "too_old", "one threshold for all prompts"),
    ],
)
def test_a_value_that_means_nothing_is_refused_with_one_that_does(
    changes: dict[str, Any], key: str, reason: str
) -> None:
    made = config(**changes)
    (problem,) = find_problems(made)
    assert problem.key == f"offpolicy.staleness.{key}"
    assert reason in problem.reason
    if "read with" in reason or not isinstance(changes.get("adapt", {}), dict):
        assert problem.overrides == ()  # which of the two is meant is for the user to say
        return
    mended = with_overrides(made, problem.overrides)
    assert list(find_problems(mended)) == []
    asked = {"eta", "etta"} & {name for name, value in changes.items() if value is not None}
    assert mended.offpolicy.staleness.eta is not None or not asked  # a limit stays a limit


def test_a_section_without_keys_is_refused() -> None:
    (problem,) = find_problems(OmegaConf.create({"offpolicy": {"staleness": 2}}))
    assert "expected its keys: eta," in str(problem)
