"""Sections of extensions: for every key, invalid values and the proposed fix."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.correction.problem import CheckError, Problem, set_to
from recipe.offpolicy.extensions.length_penalty.settings import LengthSettings
from recipe.offpolicy.extensions.opd.settings import OpdSettings
from recipe.offpolicy.extensions.pass_at_k.settings import PassAtKSettings
from recipe.offpolicy.extensions.process_reward.settings import ProcessSettings
from recipe.offpolicy.extensions.turn_credit import TurnCredit
from recipe.offpolicy.extensions.vcpo import EssLr, OptimalBaseline
from tests.support.applications import CONFIGS

SECTIONS: dict[str, tuple[str, Any]] = {
    "ess_lr": ("sqrt", lambda section, values: EssLr(section, values).ess_lr),
    "length_penalty": ("anchor", LengthSettings.from_mapping),
    "opd": ("advantage", OpdSettings.from_mapping),
    "optimal_baseline": ("group", lambda section, values: OptimalBaseline(section, values).leave_one_out),
    "pass_at_k": ("loo", PassAtKSettings.from_mapping),
    "process_reward": ("prefix_value", ProcessSettings.from_mapping),
    "turn_credit": ("turn_index", lambda section, values: TurnCredit(section, values).turn),
}
COUNT, STEP, SHARE, ABOVE_0, FLAG = (0, 1.5, True), (-1, 0.5), (-0.1, 1.1, "half"), (0, None), ("yes", 1)
PASS_RATES, SCHEDULES = (None, "high"), ([], [5, 2], [[5, 2], [1, 4]], [[5, 0]], [[-1, 2]], [[1, 2, 3]])
OUTSIDE: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "ess_lr": [("rule", ("cube", None)), ("floor", (0, 1.1, "low"))],
    "length_penalty": [
        ("kind", ("cosine", None)),
        ("coefficient", (-1,)),
        ("place zero_variance applies_to truncated anchor.per", ("inside", True)),
        ("correct_at_least", PASS_RATES),
        ("warmup.from_step warmup.steps classes.from_step", STEP),
        ("anchor.pass_rate", (0, 1.0)),
        ("anchor.min_samples anchor.window classes.samples", COUNT),
        ("reference", (0, "budget", "extra_info.")),
        ("most", (0,)),
        ("classes.easy_above", (1.0, -0.1)),
        ("classes.hard_below leave_out.below", (0, 1.1)),
        ("leave_out.dump", ("", 3)),
    ],
    "opd": [
        ("mode", ("k1", None)),
        ("teacher.url", ("localhost:8100", [], ["http://a", 3])),
        ("teacher.api_key", (3, "sk-not a name")),
        ("teacher.headers", (3, {"Key": "a b"})),
        ("teacher.sources teacher.model teacher.tokenizer", (3,)),
        ("teacher.concurrency teacher.probe_every horizon", COUNT),
        ("teacher.timeout max_gap extreme", ABOVE_0),
        ("teacher.retries", STEP),
        ("teacher.other_template corrected", FLAG),
        ("eligible.passed_above", (None,)),
        ("eligible.max_pass_rate", SHARE),
        ("eligible.rows schedule.by schedule.start schedule.end", ("some",)),
        ("coef", (0, "high")),
        ("schedule.final", (-0.1, None)),
        ("scale", ("mean", 0)),
    ],
    "optimal_baseline": [("over", ("batch", None))],
    "pass_at_k": [
        ("objective", ("best", None)),
        ("correct_at_least", PASS_RATES),
        ("schedule", SCHEDULES),
        ("seed", STEP),
        ("metric.k metric.extrapolate", (4, [0], [4, 2], [2, 2])),
        ("k dynamic.successes dynamic.max_samples dynamic.max_rounds budget.least budget.most", COUNT),
        ("budget.mode", ("rows",)),
        ("budget.decay", SHARE),
        ("budget.equal_prompts", FLAG),
        ("budget.uniform_share", (0, 1)),
    ],
    "process_reward": [
        ("force_prompt", ("", 3)),
        ("think_end", (3,)),
        ("markers", ("So ", ["So ", ""])),
        ("max_tokens max_episodes max_answer_tokens max_answers probe_every", COUNT),
        ("monte_carlo.every monte_carlo.samples", COUNT),
        ("floor coef", (0.0,)),
        ("prefix_cache normalize", ("on",)),
        ("max_unscored_share", (1.0, -0.1)),
        ("waste.within waste.penalty", (-0.1, "little")),
        ("monte_carlo.share", (0, 1.1)),
    ],
    "turn_credit": [
        ("normalize", ("turn", None)),
        ("turn_rewards", ("rewards", 3)),
        ("episode", ("yes",)),
        ("coef", (0,)),
    ],
}
"""Section -> keys, and values that each of them rejects."""
URL = "http://127.0.0.1:8100"


def read_option(section: str) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / section / f"{SECTIONS[section][0]}.yaml"))
    return dict(values)


def read(section: str, key: str = "", value: Any = None) -> Any:
    """Read the shipped option with one value changed, and with a teacher where one is required."""
    config: Any = OmegaConf.create(read_option(section))
    if section == "opd":
        config.teacher.url = URL
    if key:
        OmegaConf.update(config, key, value, merge=False)
    return SECTIONS[section][1](section, OmegaConf.to_container(config))


def refuse(section: str, key: str, value: Any) -> Problem:
    with pytest.raises((CheckError, SpecError)) as caught:
        read(section, key, value)
    error = caught.value
    (problem,) = error.problems if isinstance(error, CheckError) else [error.problem]  # type: ignore[union-attr]
    return problem


@pytest.mark.parametrize("section", SECTIONS)
def test_each_key_has_its_range(section: str) -> None:
    assert read(section) == SECTIONS[section][1](section, read_required(section))
    defaults = {
        f"{name}.{below}" if below else name: each
        for name, value in read_option(section).items()
        for below, each in (value.items() if isinstance(value, dict) else [("", value)])
    }
    refused = {key: values for keys, values in OUTSIDE[section] for key in keys.split()}
    assert defaults.keys() == refused.keys()
    for key, values in refused.items():
        for value in values:
            problem = refuse(section, key, value)
            assert (problem.key, problem.parts) == (f"{section}.{key}", ("*",))
            default = defaults[key]
            assert problem.overrides == (() if default in (None, {}) else (set_to(problem.key, default),))


CHOICES = {"ess_lr": "rule", "length_penalty": "kind", "opd": "mode", "optimal_baseline": "over"}
CHOICES |= {"pass_at_k": "objective", "turn_credit": "normalize"}
"""Section -> its key that has no default."""


def read_required(section: str) -> dict[str, Any]:
    given = {CHOICES[section]: read_option(section)[CHOICES[section]]} if section in CHOICES else {}
    return given | ({"teacher": {"url": URL}} if section == "opd" else {})


@pytest.mark.parametrize(
    ("section", "key", "value", "overrides"),
    [
        ("length_penalty", "coeficient", 3, ("~length_penalty.coeficient", "length_penalty.coefficient=3")),
        (
            "length_penalty",
            "anchor.pass_rat",
            0.8,
            ("~length_penalty.anchor.pass_rat", "length_penalty.anchor.pass_rate=0.8"),
        ),
        ("length_penalty", "warmup", 3, ()),
        ("length_penalty", "reference", 300, ()),
        ("length_penalty", "kind", "reference", ("length_penalty.kind=anchor",)),
        ("opd", "teacher.url", None, ()),
        ("opd", "corrected", False, ("opd.corrected=true",)),
        ("pass_at_k", "budget.least", 40, ("pass_at_k.budget.least=1",)),
    ],
)
def test_what_cannot_be_meant(section: str, key: str, value: Any, overrides: tuple[str, ...]) -> None:
    assert refuse(section, key, value).overrides == overrides


@pytest.mark.parametrize("section", CHOICES)
def test_what_is_wanted_has_to_be_said(section: str) -> None:
    values = {"teacher": {"url": URL}} if section == "opd" else {}
    with pytest.raises(SpecError, match=f"Set {section}="):
        SECTIONS[section][1](section, values)
