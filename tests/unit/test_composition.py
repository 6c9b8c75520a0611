"""Every shipped option composes; two that set one key, and a group that is deleted, stop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from applications import DELTAS, OPTIONS, application, without_verl
from corrections import GSM, TIS, opsm

from recipe.offpolicy.checks import spec_of
from recipe.offpolicy.composition import check_stack, chosen_options, own_keys_for_us
from recipe.offpolicy.correction import CorrectionSpec, SpecError

# The key that two options share; all other pairs may be stacked.
CONFLICTS = {
    ("opsm", "opsm_trl"): "correction.masks.opsm.",
    ("tis_sequence", "tis_token"): "correction.weight.",
}
PAIRS = list(itertools.combinations([option for option in OPTIONS if option != "none"], 2))
EXPECTED: dict[str, dict[str, Any]] = {
    "none": {"weight": None, "masks": {}},
    "tis_token": {"weight": TIS, "masks": {}},
    "tis_sequence": {"weight": TIS | {"level": "sequence", "upper": 5.0}, "masks": {}},
    "gsm": {"weight": None, "masks": {"gsm": GSM}},
    "opsm": {"weight": None, "masks": {"opsm": opsm(0.1)}},
    "opsm_trl": {"weight": None, "masks": {"opsm": opsm(0.5)}},
    "opsm_factored": {
        "weight": None,
        "masks": {"opsm_mismatch": opsm(0.1, "rollout"), "opsm_staleness": opsm(0.1, "ppo")},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_verl(tmp_path_factory.mktemp("configs"))


def deltas(*options: str) -> list[str]:
    return [override for option in options for override in DELTAS.get(option, [])]


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_alone(option: str, folder: Path) -> None:
    """The defaults are the published ones: 2.0, 5.0 and [0.99, 1.01]."""
    with application(f"correction={option}", *deltas(option), folder=folder) as config:
        assert chosen_options() == [option]
        check_stack(chosen_options())
        assert spec_of(config) == CorrectionSpec.from_mapping(EXPECTED[option])


@pytest.mark.parametrize("option", DELTAS)
def test_a_budget_that_nobody_published_must_be_given(option: str, folder: Path) -> None:
    with application(f"correction={option}", folder=folder) as config, pytest.raises(SpecError) as caught:
        spec_of(config)
    key = DELTAS[option][0].split("=")[0]
    assert f"{key} is required" in str(caught.value)
    assert f"Set {key}=" in str(caught.value)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_each_pair(pair: tuple[str, str], folder: Path) -> None:
    """Either order of a pair that shares no key makes the same correction; else both orders stop."""
    specs = []
    for one, two in (pair, pair[::-1]):
        with application(f"correction=[{one},{two}]", *deltas(*pair), folder=folder) as config:
            assert chosen_options() == [one, two]
            if pair in CONFLICTS:
                with pytest.raises(SpecError) as caught:
                    check_stack(chosen_options())
                message = str(caught.value)
                assert f"correction=[{one},{two}]" in message
                assert CONFLICTS[pair] in message
                assert f"{one} and {two} both set" in message
                assert "Choose one" in message
            else:
                check_stack(chosen_options())
                specs.append(spec_of(config))
    if specs:
        weight = next((EXPECTED[o]["weight"] for o in pair if EXPECTED[o]["weight"]), None)
        both = {"weight": weight, "masks": EXPECTED[pair[0]]["masks"] | EXPECTED[pair[1]]["masks"]}
        assert specs == [CorrectionSpec.from_mapping(both)] * 2


@pytest.mark.parametrize("options", ["none,gsm", "gsm,none", "tis_token,none"])
def test_none_stands_alone(options: str, folder: Path) -> None:
    with application(f"correction=[{options}]", folder=folder), pytest.raises(SpecError, match="none with others"):
        check_stack(chosen_options())


def test_a_conflict_among_three(folder: Path) -> None:
    message = r"tis_token and tis_sequence both set correction\.weight\."
    with (
        application("correction=[tis_token,gsm,tis_sequence]", folder=folder),
        pytest.raises(SpecError, match=message),
    ):
        check_stack(chosen_options())


def test_the_default_is_none(folder: Path) -> None:
    with application(folder=folder) as config:
        assert chosen_options() == ["none"]
        assert spec_of(config).is_none


def test_a_users_own_value_wins_over_an_option(folder: Path) -> None:
    with application("correction=tis_token", "correction.weight.upper=3", folder=folder) as config:
        check_stack(chosen_options())
        weight = spec_of(config).weight
    assert weight is not None
    assert weight.upper == 3.0


def test_options_of_the_users_own(folder: Path, tmp_path: Path) -> None:
    """They stack like the shipped ones, and conflict like them."""
    (tmp_path / "correction").mkdir()
    (tmp_path / "correction" / "mine.yaml").write_text("weight:\n  upper: 3.0\n")
    path = f"hydra.searchpath=[file://{tmp_path}]"
    with application(path, "correction=[gsm,mine]", folder=folder):
        check_stack(chosen_options())
    message = r"tis_token and mine both set correction\.weight\.upper"
    with (
        application(path, "correction=[tis_token,mine]", folder=folder),
        pytest.raises(SpecError, match=message),
    ):
        check_stack(chosen_options())


def test_a_value_that_hides_a_mapping_conflicts(folder: Path, tmp_path: Path) -> None:
    """``masks: null`` after gsm would delete its mask."""
    (tmp_path / "correction").mkdir()
    (tmp_path / "correction" / "bare.yaml").write_text("masks: null\n")
    path = f"hydra.searchpath=[file://{tmp_path}]"
    for order in ("gsm,bare", "bare,gsm"):
        with application(path, f"correction=[{order}]", folder=folder), pytest.raises(SpecError, match="both set"):
            check_stack(chosen_options())


@pytest.mark.parametrize("overrides", [["~correction"], ["correction=[]"]])
def test_a_deleted_group(overrides: list[str], folder: Path) -> None:
    with application(*overrides, folder=folder), pytest.raises(SpecError, match="Set correction=none"):
        chosen_options()


@pytest.mark.parametrize("argument", ["correction=null", "correction=NULL", "correction=", "correction = null"])
def test_null_is_refused_before_hydra_sees_it(argument: str) -> None:
    with pytest.raises(SpecError) as caught:
        own_keys_for_us(["trainer.nnodes=1", argument])
    assert "correction=null" in str(caught.value)
    assert "Set correction=none" in str(caught.value)


def test_a_group_given_twice_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"correction=gsm correction=tis_token: given 2 times.*'correction=\[one,other\]'"
    ):
        own_keys_for_us(["correction=gsm", "trainer.nnodes=1", "correction=tis_token"])


def test_only_our_keys_are_forced() -> None:
    assert own_keys_for_us([]) == []
    assert own_keys_for_us(
        ["correction=none", "correction.weight=null", "trainer.x=null", "+correction.masks.a=null", "offpolicy.x=1"]
    ) == [
        "correction=none",
        "++correction.weight=null",
        "trainer.x=null",
        "+correction.masks.a=null",
        "++offpolicy.x=1",
    ]
