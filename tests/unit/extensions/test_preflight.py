"""What the launch, --check and the doctor report about extensions before anything is started."""

from __future__ import annotations

import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.doctor.diagnosis import diagnose
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.doctor.show import Diagnosis
from recipe.offpolicy.extensions.add_on import KEY, Extension
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from recipe.offpolicy.extensions.turn_credit import TurnCredit
from recipe.offpolicy.extensions.vcpo import EssLr, OptimalBaseline
from recipe.offpolicy.preflight.composed import Composed, choose_proximal
from recipe.offpolicy.preflight.examination import Preflight, examine
from recipe.offpolicy.preflight.python_source import OURS
from tests.support.applications import NEEDED, application
from tests.support.nudge import Nudge
from tests.support.short_keys import in_full, read_changes, read_table

pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")

ON = (f"{KEY}.one=tests.support.nudge:Nudge", "+one.bonus=0.5", f"{KEY}.two=tests.support.nudge:Nudge", "+two.tilt=1")

ONE_STEP = ("data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=256")


class Estimating(Nudge):
    def estimate(self, batch: object, rewards: object) -> None:
        return None


def examined(*overrides: str) -> Preflight:
    given = [f"++{each}" if each.startswith(KEY) else each for each in overrides]
    with application(*given, *NEEDED) as config:
        return examine(config, given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ([f"{KEY}.one={__name__}:Estimating", f"{KEY}.two={__name__}:Estimating", "+one={}", "+two={}"], "two", "one"),
        (
            [*ON, "correction=none", "actor_rollout_ref.rollout.calculate_log_probs=false"],
            "actor_rollout_ref.rollout.calculate_log_probs",
            "one changes the loss",
        ),
    ],
)
def test_problems_name_key_reason_and_fix(overrides: list[str], key: str, said: str) -> None:
    (problem,) = [each for each in examined(*overrides).problems if each.key == key]
    assert said in problem.reason
    assert problem.advice


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True])
def test_a_reader_of_pi_old_is_a_reason_against_reuse(reads: bool) -> None:
    given = [f"++{KEY}.one=tests.support.nudge:Nudge", f"+one.pi_old={str(reads).lower()}", "correction=tis_token"]
    with application(*given, *ONE_STEP, *NEEDED) as config:
        choice = choose_proximal(Composed(config))
    assert ("the extension one reads pi_old" in choice.said) == reads


def diagnosed(*arguments: str) -> Diagnosis:
    return diagnose(Launch(OURS, (*arguments, *NEEDED)))


@pytest.mark.slow
def test_the_doctor_has_a_row_for_each() -> None:
    found = diagnosed("correction=tis_token", f"{KEY}.one=tests.support.nudge:Nudge", "+one={bonus: 0, tilt: 0}")
    verdicts = {row.name: row.verdict for row in found.rows}
    assert verdicts == {"weight": "OK", "one": "NO-OP"}
    assert found.status == 1


# Keys next to which an extension is ERROR, NO-OP or worth a note, with the override that fixes it


EXTENSIONS: dict[str, type[Extension]] = {
    "ess_lr": EssLr,
    "length_penalty": LengthPenalty,
    "optimal_baseline": OptimalBaseline,
    "pass_at_k": PassAtK,
    "turn_credit": TurnCredit,
}
ONE_RELEASE = [pytest.mark.verl("==0.9.1")]
TABLE = [
    pytest.param(*head.split(": "), cases, marks=ONE_RELEASE if head.startswith("ess_lr") else [])
    for head, cases in read_table("extension_problems.txt")
]


@pytest.mark.parametrize(("section", "base", "cases"), TABLE)
def test_what_an_extension_cannot_stand_beside(section: str, base: str, cases: list[list[str]]) -> None:
    def named(text: str) -> str:
        return re.sub(r"(^|[ +~])\.(?=\w)", rf"\g<1>{section}.", text)

    for words, *expected in cases:
        config: Any = OmegaConf.create({section: {}})
        for key, value in (read_changes(named(base)) | read_changes(named(words))).items():
            OmegaConf.update(config, key, value, force_add=True)
        settings: Any = OmegaConf.to_container(config[section])
        found = list(EXTENSIONS[section](section, settings).problems(config))
        assert len(found) == len(expected), words
        for problem, wanted in zip(found, map(named, expected), strict=True):
            head, _, said = wanted.partition(" ~ ")
            head, _, fixes = head.partition(": ")
            verdict, key = head.split()
            assert (problem.verdict, problem.key) == (verdict, in_full(key)), words
            own = [f"{problem.key}{each}" if each.startswith("=") else in_full(each) for each in fixes.split("; ")]
            assert list(problem.overrides) == (own if fixes else []), words
            said = f"{problem.key}{said}" if said.startswith("=") else said
            assert said in f"{problem.reason} {problem.advice}", words
