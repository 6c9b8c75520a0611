"""The keys ``offpolicy.staleness``, and the choice of eta by hand and by simulation."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.batch.declared_keys import read_shipped_defaults
from recipe.offpolicy.staleness.staleness_settings import AdaptSettings, EtaController, StalenessSettings, find_problems
from tests.support.overridden import with_overrides


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


# The choice of eta on sample sizes that fall with the age of rows, by hand and by simulation


def build(eta: float = 0, **changes: Any) -> EtaController:
    keys = {"ess": 0.9, "trainer_wait": 0.05, "floor": 0, "ceiling": 8, "every": 1, "patience": 2, "step": 1}
    return EtaController(AdaptSettings(**{**keys, **changes}), Fraction(str(eta)))


def observe(made: EtaController, *seen: tuple[float, float]) -> list[float]:
    etas = []
    for ess, waited in seen:
        made.observe(ess, waited)
        etas.append(float(made.eta))
    return etas


def test_eta_rises_where_the_trainer_waits_and_the_sample_size_allows_it() -> None:
    """After a rise to n, rows of age n arrive n steps later."""
    assert observe(build(), (0.95, 0.5), (0.95, 0.5), (0.95, 0.5)) == [1, 1, 2]
    assert observe(build(), (0.95, 0.05), (0.89, 0.5), (math.nan, 0.5)) == [0, 0, 0]
    assert observe(build(ceiling=0.5), (0.95, 0.5), (0.95, 0.5), (0.95, 0.5)) == [0.5, 0.5, 0.5]


def test_eta_falls_after_as_many_judgements_as_patience_says_in_succession() -> None:
    low, high = (0.8, 0.5), (0.9, 0.0)
    assert observe(build(3), low, high, low, low) == [3, 3, 3, 2]
    assert observe(build(3, patience=1), low, low, low, low, low) == [2, 2, 2, 2, 1]
    assert observe(build(1, floor=1), low, low, low) == [1, 1, 1]


def test_eta_stays_where_it_fell_to_until_the_sample_size_has_improved_by_what_it_lacked() -> None:
    """At eta 1, the sample size is 0.02 too small; back at eta 0, it is 0.95, but 0.97 is required."""
    made = build(1)
    assert observe(made, (0.88, 0.5), (0.88, 0.5)) == [1, 0]
    assert observe(made, (0.88, 0.5), (0.95, 0.5), (0.96, 0.5), (0.971, 0.5)) == [0, 0, 0, 1]


def test_the_state_goes_through_json_and_goes_on_alike() -> None:
    chance = random.Random(5)
    seen = [(chance.uniform(0.8, 1.0), chance.random()) for _ in range(60)]
    for cut in range(0, 60, 7):
        whole, first, second = (build(0.5, every=2, step=0.5) for _ in range(3))
        observe(first, *seen[:cut])
        second.restore(json.loads(json.dumps(first.state())))
        assert observe(whole, *seen)[cut:] == observe(second, *seen[cut:])
