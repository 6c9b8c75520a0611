"""Sections of extensions: every key, what it cannot be, and what is proposed instead."""

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
COUNT, SHARE, FLAG, TEXT, RISING = (0, 1.5, True), (-0.1, 1.1, "half"), ("yes", 1), (3,), (4, [0], [4, 2], [2, 2])
OUTSIDE: dict[str, dict[str, tuple[Any, ...]]] = {
    "ess_lr": {"rule": ("cube", None), "floor": (0, 1.1, "low")},
    "length_penalty": {
        "kind": ("cosine", None),
        "coefficient": (-1,),
        "place": ("inside",),
        "zero_variance": (True,),
        "applies_to": ("wrong",),
        "correct_at_least": (None, "high"),
        "warmup.from_step": (-1, 0.5),
        "warmup.steps": (-1, 0.5),
        "anchor.pass_rate": (0, 1.0),
        "anchor.min_samples": COUNT,
        "anchor.window": COUNT,
        "anchor.per": ("step",),
        "reference": (0, "budget", "extra_info."),
        "most": (0,),
        "truncated": ("masked",),
        "classes.from_step": (-1, 0.5),
        "classes.samples": COUNT,
        "classes.easy_above": (1.0, -0.1),
        "classes.hard_below": (0, 1.1),
        "leave_out.dump": ("", 3),
        "leave_out.below": (0, 1.1),
    },
    "opd": {
        "mode": ("k1", None),
        "teacher.url": ("localhost:8100", [], ["http://a", 3]),
        "teacher.api_key": (3, "sk-not a name"),
        "teacher.headers": (3, {"Key": "a b"}),
        "teacher.sources": (3,),
        "teacher.model": TEXT,
        "teacher.tokenizer": TEXT,
        "teacher.concurrency": COUNT,
        "teacher.timeout": (0, None),
        "teacher.probe_every": COUNT,
        "teacher.retries": (-1, 0.5),
        "teacher.other_template": FLAG,
        "eligible.passed_above": (None,),
        "eligible.max_pass_rate": SHARE,
        "eligible.rows": ("some",),
        "coef": (0, "high"),
        "schedule.by": ("loss",),
        "schedule.start": ("high",),
        "schedule.end": ("low",),
        "schedule.final": (-0.1, None),
        "horizon": COUNT,
        "max_gap": (0, None),
        "scale": ("mean", 0),
        "corrected": FLAG,
        "extreme": (0, None),
    },
    "optimal_baseline": {"over": ("batch", None)},
    "pass_at_k": {
        "objective": ("best", None),
        "k": COUNT,
        "correct_at_least": (None, "high"),
        "schedule": ([], [5, 2], [[5, 2], [1, 4]], [[5, 0]], [[-1, 2]], [[1, 2, 3]]),
        "seed": (-1, 0.5),
        "metric.k": RISING,
        "metric.extrapolate": RISING,
        "dynamic.successes": COUNT,
        "dynamic.max_samples": COUNT,
        "dynamic.max_rounds": COUNT,
        "budget.mode": ("rows",),
        "budget.least": COUNT,
        "budget.most": COUNT,
        "budget.decay": SHARE,
        "budget.equal_prompts": FLAG,
        "budget.uniform_share": (0, 1),
    },
    "process_reward": {
        "force_prompt": ("", 3),
        "think_end": TEXT,
        "markers": ("So ", ["So ", ""]),
        "max_tokens": COUNT,
        "max_episodes": COUNT,
        "max_answer_tokens": COUNT,
        "max_answers": COUNT,
        "floor": (0.0,),
        "prefix_cache": ("on",),
        "normalize": ("mean",),
        "coef": (0,),
        "probe_every": COUNT,
        "max_unscored_share": (1.0, -0.1),
        "waste.within": (-0.1, "little"),
        "waste.penalty": (-1, None),
        "monte_carlo.every": COUNT,
        "monte_carlo.share": (0, 1.1),
        "monte_carlo.samples": COUNT,
    },
    "turn_credit": {"normalize": ("turn", None), "turn_rewards": ("rewards", 3), "episode": ("yes",), "coef": (0,)},
}
URL = "http://127.0.0.1:8100"


def read_option(section: str) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / section / f"{SECTIONS[section][0]}.yaml"))
    return dict(values)


def read(section: str, key: str = "", value: Any = None) -> Any:
    """Read the shipped option with one value changed, and a teacher where there has to be one."""
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
    assert defaults.keys() == OUTSIDE[section].keys()
    for key, values in OUTSIDE[section].items():
        for value in values:
            problem = refuse(section, key, value)
            assert (problem.key, problem.parts) == (f"{section}.{key}", ("*",))
            default = defaults[key]
            assert problem.overrides == (() if default in (None, {}) else (set_to(problem.key, default),))


def read_required(section: str) -> dict[str, Any]:
    """Return the keys that have no default."""
    choice = {"ess_lr": "rule", "length_penalty": "kind", "opd": "mode", "optimal_baseline": "over"}.get(section)
    choice = "normalize" if section == "turn_credit" else choice
    choice = "objective" if section == "pass_at_k" else choice
    given = {choice: read_option(section)[choice]} if choice else {}
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


@pytest.mark.parametrize("section", ["ess_lr", "length_penalty", "opd", "optimal_baseline", "pass_at_k", "turn_credit"])
def test_what_is_wanted_has_to_be_said(section: str) -> None:
    values = {"teacher": {"url": URL}} if section == "opd" else {}
    with pytest.raises(SpecError, match=f"Set {section}="):
        SECTIONS[section][1](section, values)


def test_all_problems_of_a_section_are_said_at_once() -> None:
    with pytest.raises(CheckError) as caught:
        PassAtKSettings.from_mapping("p", {"k": 0, "budget": {"most": 0}, "schedul": None})
    assert {problem.key for problem in caught.value.problems} == {"p.k", "p.budget.most", "p.schedul"}
