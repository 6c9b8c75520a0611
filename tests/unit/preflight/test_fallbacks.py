"""Fallbacks are named like corrections, mean what their files say, and are checked as strictly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.monitor.alarm_settings import read_settings
from recipe.offpolicy.preflight.composed import Composed, read_correction
from recipe.offpolicy.preflight.resolve import _resolve_fallbacks as resolve
from recipe.offpolicy.preflight.resolve import check_fallbacks as check
from tests.support.applications import NEEDED, application, changed
from tests.support.corrections import GSM, TIS

KEY = "offpolicy.alarms.ess"
TAKEN = f"{KEY}.action=fallback"


pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")


def resolved(folder: Path, *overrides: str) -> DictConfig:
    with application(TAKEN, *overrides, folder=folder) as config:
        resolve(config)
        return config


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as error:
        resolved(folder, *overrides)
    return str(error.value)


def test_a_stack_is_composed_from_its_files(folder: Path) -> None:
    config = resolved(folder, "correction=gsm", f"{KEY}.fallback=[tis_token,gsm]", "correction.masks.gsm.upper=1.5")
    alarm = read_settings(config)["ess"]
    # The override is of the configured correction.
    assert alarm.fallback == CorrectionSpec.from_mapping({"weight": TIS, "masks": {"gsm": GSM}})
    assert alarm.options == ("tis_token", "gsm")
    assert config.correction.masks.gsm.upper == 1.5


def test_the_support_that_is_replayed_holds_for_the_fallback(folder: Path) -> None:
    asked = ("correction.support=engine", "correction.support_unknown=full", "correction.support_size=8")
    fallback = read_settings(resolved(folder, "correction=gsm", f"{KEY}.fallback=tis_token", *asked))["ess"].fallback
    assert (fallback.support, fallback.support_unknown, fallback.support_size) == ("engine", "full", 8)


def test_score_centering_holds_for_the_fallback_and_does_not_begin_with_it(folder: Path) -> None:
    asked = ("correction=gsm", f"{KEY}.fallback=tis_token", "correction.centering=8")
    fallback = read_settings(resolved(folder, *asked))["ess"].fallback
    assert fallback.centering == 8
    with pytest.raises(SpecError, match="requests them from the start"):
        resolved(folder, "correction=gsm", f"{KEY}.fallback=[tis_token,paper/score_centering]")
    with pytest.raises(SpecError) as refused:
        resolved(folder, "correction=gsm", f"{KEY}.fallback=tis_sequence", "correction.centering=8")
    assert (refused.value.problem.key, refused.value.problem.value) == (f"{KEY}.fallback", ["tis_sequence"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("nothing_like_it", "no such option. docs/corrections.md explains"),
        ("[tis_token,mis_token]", "both set correction.weight"),
        ("none", "none is not a safer correction"),
        ("opsm", "masks.opsm.delta=???: required and not set"),
    ],
)
def test_what_cannot_be_a_fallback(folder: Path, value: str, expected: str) -> None:
    message = refused(folder, "correction=gsm", f"{KEY}.fallback={value}")
    assert message.startswith(f"{KEY}.fallback=")
    assert expected in message


@pytest.fixture(scope="module")
def whole() -> Iterator[DictConfig]:
    """A configuration with verl's own keys, which the checks read."""
    with application("correction=gsm", TAKEN, f"{KEY}.fallback=[tis_token,gsm]", *NEEDED) as config:
        resolve(config)
        yield config


GSM_SPEC = CorrectionSpec.from_mapping({"masks": {"gsm": GSM}})


def checked(config: DictConfig) -> list[dict[str, Any]]:
    """The corrections that the start-up checks receive."""
    seen: list[Any] = []
    spec = CorrectionSpec.from_mapping(read_correction(Composed(config)))
    check(Composed(config, spec), lambda other: seen.append(OmegaConf.to_container(other.config.correction)))
    return seen


@pytest.mark.slow
def test_start_up_checks_look_at_it_as_at_a_configured_one(whole: DictConfig) -> None:
    from recipe.offpolicy.correction.problem import CheckError
    from recipe.offpolicy.preflight.examination import run_checks

    assert checked(whole) == [CorrectionSpec.from_mapping({"weight": TIS, "masks": {"gsm": GSM}}).to_mapping()]
    before = OmegaConf.to_container(whole)
    check(Composed(whole, GSM_SPEC), run_checks)
    assert OmegaConf.to_container(whole) == before
    # A cap below 1 leaves out the weight of policies that agree: that is refused where it is configured, and here.
    wrong = changed(whole, {f"{KEY}.fallback.correction.weight.upper": 0.5})
    with pytest.raises(CheckError) as stopped:
        check(Composed(wrong, GSM_SPEC), run_checks)
    assert str(stopped.value).startswith(
        "correction.weight.upper=0.5: offpolicy.alarms.ess.fallback=[tis_token,gsm] would stop the run if it "
        "were configured: the bounds exclude 1"
    )
    # What is configured is not the fallback, so that an override of it would fix nothing.
    assert stopped.value.problems[0].overrides == ()


def test_the_configured_one_is_no_fallback(whole: DictConfig) -> None:
    same = changed(whole, {f"{KEY}.fallback.correction": GSM_SPEC.to_mapping()})
    with pytest.raises(SpecError, match="this correction is already configured"):
        checked(same)


def test_forward_passes_cannot_change_in_a_run(whole: DictConfig) -> None:
    bypass = {"proximal": "bypass", "masks": {"gsm": GSM | {"ratio": "full"}}}
    other = changed(whole, {f"{KEY}.fallback.correction": CorrectionSpec.from_mapping(bypass).to_mapping()})
    with pytest.raises(SpecError, match=r"correction\.proximal=bypass differs from the run's, recompute"):
        checked(other)
