"""The doctor on launches with distillation: OK, NO-OP and ERROR, and overrides that fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig

from recipe.offpolicy.doctor.diagnosis import judge
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.doctor.show import Diagnosis
from recipe.offpolicy.preflight.python_source import OURS
from tests.support.applications import NEEDED, application, changed
from tests.support.fake_teacher import FakeTeacher, serving
from tests.support.mended import with_overrides

pytestmark = [pytest.mark.verl(">=0.9"), pytest.mark.usefixtures("each_actor_is_probed_once")]

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    overrides = (
        "correction=tis_token",
        "opd=advantage",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.n=8",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    )
    with (
        serving(FakeTeacher(length=8192)) as teacher,
        application(*overrides, f"opd.teacher.url={teacher.url}", *NEEDED) as config,
    ):
        yield config


def diagnosed(config: DictConfig) -> Diagnosis:
    return judge(config, Launch(OURS, ()))


def test_a_run_with_a_teacher_is_live(base: DictConfig) -> None:
    diagnosis = diagnosed(base)
    assert diagnosis.verdict == "OK"
    (row,) = [row for row in diagnosis.rows if row.name == "opd"]
    assert row.meaning.startswith("advantage, coef=1, failed rollouts of prompts with a pass rate of at most 0.25")
    assert "; opd (advantage, coef=1" in diagnosis.headline


CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "below one of n": (
        "NO-OP",
        "opd.eligible.max_pass_rate",
        {"opd.eligible.max_pass_rate": 0.1},
        "this value acts as 0",
    ),
    "alarm without a fallback": (
        "ERROR",
        "offpolicy.alarms.opd_overlap.action",
        {"offpolicy.alarms.opd_overlap.action": "fallback"},
        "another correction does not change the metric of opd",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_inert_or_wrong_is_told_and_mended(name: str, base: DictConfig) -> None:
    verdict, row, changes, said = CASES[name]
    config = changed(base, changes)
    diagnosis = diagnosed(config)
    assert diagnosis.verdict == verdict
    problems = [each for each in diagnosis.problems if said in str(each)]
    assert problems, diagnosis.problems
    assert row in ("", *(each.name for each in diagnosis.rows if problems[0] in each.problems))
    if not all(each.overrides for each in diagnosis.problems if each.verdict != "NOTE"):
        return  # either side was asked for
    for _ in range(2):  # what is fixed may show what stood next to it
        config = with_overrides(config, [override for each in diagnosis.problems for override in each.overrides])
        diagnosis = diagnosed(config)
    assert diagnosis.verdict == "OK", diagnosis.problems
