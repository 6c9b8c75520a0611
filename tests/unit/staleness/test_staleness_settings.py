"""The keys ``offpolicy.staleness``: read, and refused with a value that fixes them."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.batch.declared_keys import read_shipped_defaults
from recipe.offpolicy.staleness.staleness_settings import AdaptSettings, StalenessSettings, find_problems
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
    ("changes", "key"),
    [
        ({"eta": 0, "too_old": "drop"}, "too_old"),
        ({"eta": 0, "too_old": "refresh"}, "too_old"),
        ({"adapt": {"ess": 0.9}}, "eta"),
        ({"eta": 1, "adapt": {"ess": 0.9, "floor": 2, "ceiling": 1}}, "adapt.floor"),
        ({"eta": 9, "adapt": {"ess": 0.9}}, "eta"),
        ({"eta": 0, "too_old": "drop", "adapt": {"ess": 0.9}}, "too_old"),
    ],
)
def test_what_contradicts_is_refused_with_a_value_that_does_not(changes: dict[str, Any], key: str) -> None:
    made = config(**changes)
    (problem,) = find_problems(made)
    assert problem.key == f"offpolicy.staleness.{key}"
    mended = with_overrides(made, problem.overrides)
    assert list(find_problems(mended)) == []
    assert mended.offpolicy.staleness.eta is not None  # a limit stays a limit
