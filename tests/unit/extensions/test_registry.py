"""Sections and classes that cannot be enabled."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.extensions.add_on import KEY, SHIPPED, find_problems, load_extensions
from tests.support.paths import ROOT

NUDGE = "tests.support.nudge:Nudge"


def found(registered: Any, **sections: Any) -> list[tuple[str, Any]]:
    config = OmegaConf.create({"offpolicy": {"extensions": registered}, **sections})
    return [(problem.key, problem.value) for problem in find_problems(config)]


def test_what_is_registered_and_not_there_is_named() -> None:
    assert found({"nudge": NUDGE}) == [(f"{KEY}.nudge", NUDGE)]
    assert found({"nudge": NUDGE}, nudge=3) == [("nudge", 3)]
    assert found("nudge") == [(KEY, "nudge")]


@pytest.mark.parametrize("value", [True, "uniform"])
def test_a_shipped_section_without_keys_is_not_off_in_silence(value: Any) -> None:
    assert found(None, length_penalty=value, opd=None, pass_at_k={}) == [("length_penalty", value)]


@pytest.mark.parametrize("target", ["no.such.module:Nudge", "tests.support.nudge:NoSuch", "pathlib:Path"])
def test_a_class_that_is_not_there_is_named_with_its_key(target: str) -> None:
    config = OmegaConf.create({"offpolicy": {"extensions": {"nudge": target}}, "nudge": {}})
    with pytest.raises(CheckError) as caught:
        load_extensions(config)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == (f"{KEY}.nudge", target)


@pytest.mark.parametrize("section", SHIPPED)
def test_a_shipped_extension_has_options_a_default_and_a_place_in_the_documentation(section: str) -> None:
    """Its group is off by default, so `section=option` needs no plus sign."""
    assert list((ROOT / "configs" / section).glob("*.yaml")), f"configs/{section} holds no option"
    base: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "offpolicy_base.yaml"))
    assert {section: None} in base["defaults"], f"configs/offpolicy_base.yaml does not list {section}"
    assert f"`{section}`" in (ROOT / "docs" / "extensions.md").read_text()
