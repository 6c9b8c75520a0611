"""A launch that stops names a fix, and no longer stops for that reason once the fix is pasted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig

from recipe.offpolicy.correction import Problem
from recipe.offpolicy.doctor.diagnosis import judge
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.preflight.python_source import OURS
from tests.support.applications import NEEDED, application, changed
from tests.support.doctor_cases import ROLLOUT
from tests.support.overridden import with_overrides

pytestmark = [pytest.mark.verl(">=0.9"), pytest.mark.slow]

Changes = dict[str, Any]
SHADOW = "offpolicy.shadow"

# What is changed next to correction=[tis_token,gsm], and the key of the problem that it makes.
BESIDE: dict[str, tuple[Changes, str]] = {
    "a set-up that nothing reads": ({"setup.engine": "same"}, "setup.engine"),
    "a set-up's key misspelt": ({"setup.modle": "moe"}, "setup.modle"),
    "a set-up's value misspelt": ({"setup.model": "densee"}, "setup.model"),
    "no mini-batches": ({"setup.minibatches": 0}, "setup.minibatches"),
    "a shadow of no name": ({SHADOW: [5]}, SHADOW),
    "a shadow that there is not": ({SHADOW: ["gms"]}, SHADOW),
    "a shadow twice": ({SHADOW: ["gsm", "gsm"]}, SHADOW),
    "a shadow with a pi_old of its own": ({SHADOW: ["bypass"]}, SHADOW),
    "a delta of no shadow": ({"offpolicy.shadow_delta": 0.5}, "offpolicy.shadow_delta"),
    "a fallback of no name": (
        {"offpolicy.alarms.ess.action": "fallback", "offpolicy.alarms.ess.fallback": 5},
        "offpolicy.alarms.ess.fallback",
    ),
}


# What is changed next to correction=auto setup.model=dense.
CHOSEN: dict[str, tuple[Changes, str]] = {
    "a number that is contradicted": ({"setup.minibatches": 3}, "setup.minibatches"),
    "a limit of staleness that is too wide": (
        {"trainer.v1.trainer_mode": "colocate_async", "offpolicy.staleness.eta": 20},
        "offpolicy.staleness.eta",
    ),
}


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    with application("correction=[tis_token,gsm]", f"{ROLLOUT}.name=vllm", *NEEDED) as config:
        yield config


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def told(config: DictConfig, key: str) -> list[Problem]:
    diagnosis = judge(changed(config, {}), Launch(OURS, ()))
    return [problem for problem in diagnosis.problems if problem.key == key]


def follow(config: DictConfig, key: str) -> None:
    problems = told(config, key)
    assert problems, judge(config, Launch(OURS, ())).problems
    for problem in problems:
        if not problem.overrides:  # either side of a conflict was asked for
            assert re.search(r"\bor\b|;", problem.fix), problem
            continue
        lost = [each for each in problem.overrides if each.startswith("~") or each.endswith(("=null", "=none"))]
        assert len(lost) < len(problem.overrides), f"{problem}: {problem.pasted} removes what was asked for"
        fixed = with_overrides(config, problem.overrides)
        assert problem.reason not in [left.reason for left in told(fixed, key)], problem


@pytest.mark.parametrize(("changes", "key"), BESIDE.values(), ids=BESIDE)
def test_what_is_proposed_mends_a_launch(changes: Changes, key: str, base: DictConfig) -> None:
    follow(changed(base, changes), key)


@pytest.fixture(scope="module")
def chosen() -> Iterator[DictConfig]:
    with application("correction=auto", "setup.model=dense", f"{ROLLOUT}.name=vllm", *NEEDED) as config:
        yield config


@pytest.mark.parametrize(("changes", "key"), CHOSEN.values(), ids=CHOSEN)
def test_what_is_proposed_mends_a_launch_that_chooses(changes: Changes, key: str, chosen: DictConfig) -> None:
    follow(changed(chosen, changes), key)
