"""The names of our keys and of verl's keys come from the files that ship them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipe.offpolicy.correction import Problem, SpecError
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.preflight.hydra_groups import force_own_keys, restore_defaults
from tests.support.applications import DELTAS, OPTIONS, application
from tests.support.examples import each_nth_by_default

# Overrides of the launch -> what is proposed, and what the correction is after it is pasted.
FIXES = {
    ("tis_token", "weight.upper=abc"): (["correction.weight.upper=2.0"], {"weight.upper": 2.0}),
    ("gsm", "masks.gsm.threshold=0.98_1.03"): (None, {"masks.gsm.lower": 0.98, "masks.gsm.upper": 1.03}),
    ("tis_token", "weight=3"): (None, {"weight.upper": 3.0, "weight.level": "token"}),
    ("tis_token", "weight.cap=3"): (["~correction.weight.cap", "correction.weight.upper=3.0"], {"weight.upper": 3.0}),
    ("opsm", "masks.opsm=0.2"): (None, {"masks.opsm.delta": 0.2, "masks.opsm.when": "negative"}),
    ("log_ratio_penalty", "penalty=0.1"): (None, {"penalty.coefficient": 0.1}),
}


def fixed(option: str, given: list[str], folder: Path) -> tuple[Problem | None, dict[str, Any]]:
    with application(f"correction={option}", *force_own_keys(given), folder=folder) as config:
        try:
            return None, Composed(config).spec.to_mapping()
        except SpecError as error:
            return restore_defaults(error.problem), {}


@pytest.mark.parametrize(("option", "override"), FIXES)
def test_a_fix_keeps_what_was_asked_for(option: str, override: str, folder: Path) -> None:
    expected, left = FIXES[option, override]
    given = [f"correction.{override}"]
    problem, _ = fixed(option, given, folder)
    assert expected in (None, list(problem.overrides))
    after, spec = fixed(option, [*given, *problem.overrides], folder)
    assert after is None
    for key, value in left.items():
        node = spec
        for name in key.split("."):
            node = node[name]
        assert node == value


@pytest.mark.slow
@pytest.mark.parametrize("option", each_nth_by_default(10, [each for each in OPTIONS if each not in ("auto", "none")]))
def test_every_bound_of_every_option_comes_back(option: str, folder: Path) -> None:
    """Whatever is written into a key of an option, the fix is the option's own value."""
    deltas = DELTAS.get(option, [])
    _, whole = fixed(option, deltas, folder)
    parts = [f"masks.{name}" for name in whole.get("masks") or {}] + ["weight"] * bool(whole.get("weight"))
    for part in parts:
        values = whole["weight"] if part == "weight" else whole["masks"][part.removeprefix("masks.")]
        for name in ("lower", "upper", "budget", "level", "aggregate", "kind"):
            if values.get(name) is not None and f"correction.{part}.delta" not in str(deltas):
                given = [*deltas, f"correction.{part}.{name}=qqq"]
                problem, _ = fixed(option, given, folder)
                if problem.overrides:
                    assert fixed(option, [*given, *problem.overrides], folder)[1] == whole
                else:
                    assert name == "level"
