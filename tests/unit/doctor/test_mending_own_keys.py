"""Every value that no key under ``offpolicy`` accepts is fixed by pasting the proposal."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.preflight.checks.staleness import check_own_keys
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.preflight.hydra_groups import force_own_keys
from tests.support.applications import application, changed, without_verl
from tests.support.corrections import GSM
from tests.support.overridden import with_overrides

pytestmark = [pytest.mark.verl(">=0.9"), pytest.mark.usefixtures("each_actor_is_probed_once")]

ALARM = "offpolicy.alarms.ess"
CALIBRATE = "offpolicy.calibrate"
MEAN = "offpolicy.alarms.mean_weight"
WATCHDOG = "offpolicy.watchdog"
ON = {f"{CALIBRATE}.target_kept": 0.98}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = without_verl(tmp_path_factory.mktemp("configs"))
    with application("correction=[tis_token,gsm]", folder=folder) as config:
        yield config


# What is set, and of it the values after the pastes that keys have to have.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "crossed beyond the stricter one": ({f"{MEAN}.lower": 3}, {f"{MEAN}.lower": 0.5, f"{MEAN}.recovery_lower": 0.6}),
    "a bound and a count": (
        {f"{ALARM}.lower": "low", f"{ALARM}.patience": 0},
        {f"{ALARM}.lower": 0.3, f"{ALARM}.patience": 3},
    ),
    "of no mask": (ON | {f"{CALIBRATE}.of": ["gms"]}, {f"{CALIBRATE}.of": ["gsm"]}),
    "a cap below 1": ({f"{CALIBRATE}.target_ess": 0.9, "correction.weight.upper": 1.0}, {}),
    "more masks than a recording tells apart": (
        {"offpolicy.record.dir": "x", "correction.masks": {f"m{number}": GSM for number in range(33)}},
        {},
    ),
    "a place below a file": ({"offpolicy.record.dir": __file__ + "/below"}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_value_is_mended(name: str, base: DictConfig) -> None:
    changes, expected = REFUSED[name]
    config = changed(base, changes)
    assert list(check_own_keys(Composed(config))), "nothing is refused"
    for _ in range(4):
        found = list(check_own_keys(Composed(config)))
        if not found:
            break
        if not all(problem.overrides for problem in found):
            # Nothing is proposed where only the user can say what was meant; what was asked for stays.
            assert expected == {}, found
            assert all(problem.fix or problem.reason.startswith("expected") for problem in found)
            return
        proposed = list(dict.fromkeys(each for problem in found for each in problem.overrides))
        config = with_overrides(config, force_own_keys(proposed))
    assert list(check_own_keys(Composed(config))) == []
    plain: Any = {key: OmegaConf.select(config, key) for key in expected}
    assert {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in plain.items()} == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [("offpolicy.alarms", None), (CALIBRATE, None), (f"{WATCHDOG}.phase_timeouts", 3)],
)
def test_what_an_override_takes_away_comes_back_only_without_it(key: str, value: Any, base: DictConfig) -> None:
    """An empty mapping instead would silently switch off the shipped values."""
    (problem,) = check_own_keys(Composed(changed(base, {key: value}), Composed(base).spec))
    assert problem.overrides == ()
    assert problem.fix.startswith("Remove this override") or problem.reason.startswith(
        "expected a section with the keys"
    )
