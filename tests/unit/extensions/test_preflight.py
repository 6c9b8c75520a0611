"""What launch, --check and doctor say of extensions, before anything is started."""

from __future__ import annotations

import pytest

from recipe.offpolicy.doctor.diagnosis import diagnose
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.doctor.show import Diagnosis
from recipe.offpolicy.extensions.add_on import KEY
from recipe.offpolicy.preflight.composed import Composed, choose_proximal
from recipe.offpolicy.preflight.examination import Preflight, examine
from recipe.offpolicy.preflight.python_source import OURS
from tests.support.applications import NEEDED, application
from tests.support.nudge import Nudge

ON = (f"{KEY}.one=tests.support.nudge:Nudge", "+one.bonus=0.5", f"{KEY}.two=tests.support.nudge:Nudge", "+two.tilt=1")
pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")

ONE_STEP = ("data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=256")


class Estimating(Nudge):
    def estimate(self, batch: object, rewards: object) -> None:
        return None


def examined(*overrides: str) -> Preflight:
    given = [f"++{each}" if each.startswith(KEY) else each for each in overrides]
    with application(*given, *NEEDED) as config:
        return examine(config, given)


def keys(found: Preflight) -> list[str]:
    return [problem.key for problem in found.problems if problem.verdict != "NOTE"]


def test_the_headline_names_what_is_on() -> None:
    found = examined("correction=none", *ON)
    assert keys(found) == []
    assert "; one (bonus=0.5, " in found.headline
    assert "; two (bonus=0.5, tilt=1, " in found.headline
    assert found.headline.startswith("UNCORRECTED")


@pytest.mark.slow
def test_what_configure_sets_is_set_and_said() -> None:
    with application(f"++{KEY}.one=tests.support.nudge:Nudge", "+one.experiment_name=nudged", *NEEDED) as config:
        found = examine(config, [])
        assert config.trainer.experiment_name == "nudged"
    assert "one: trainer.experiment_name is nudged." in found.said


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ([f"{KEY}.one=tests.support.nudge:Nudge", "+one.bonus=-1"], "one.bonus", "below 0"),
        ([f"{KEY}.one=tests.support.nudge:Nudge", "+one={bonus: 0, tilt: 0}"], "one.tilt", "nothing is shaped"),
        (
            [f"{KEY}.one={__name__}:Estimating", f"{KEY}.two={__name__}:Estimating", "+one={}", "+two={}"],
            "two",
            "one",
        ),
        (
            [*ON, "correction=none", "actor_rollout_ref.rollout.calculate_log_probs=false"],
            "actor_rollout_ref.rollout.calculate_log_probs",
            "one acts on the loss",
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


@pytest.mark.slow
def test_the_watchdog_takes_limits_of_their_phases() -> None:
    limit = "+offpolicy.watchdog.phase_timeouts.one=60"
    (problem,) = [each for each in examined(limit).problems if each.verdict == "ERROR"]
    assert "update_critic" in problem.fix, "the phases that there are"
