"""Each rule of the doctor, with a configuration that triggers it and one that does not; pasting its fix fixes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig, open_dict

from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.doctor.diagnosis import judge
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.doctor.show import Diagnosis
from recipe.offpolicy.launch_callback import prepare
from recipe.offpolicy.preflight.python_source import OURS
from tests.support.applications import NEEDED, application, changed
from tests.support.corrections import GSM, opsm
from tests.support.doctor_cases import CASES, ROLLOUT, TIS_OF_VERL, VERLS, Case
from tests.support.examples import each_nth_by_default
from tests.support.overridden import with_overrides

pytestmark = [pytest.mark.verl(">=0.9"), pytest.mark.usefixtures("each_actor_is_probed_once")]


@pytest.fixture(scope="module")
def bases() -> Iterator[dict[str, DictConfig]]:
    """Base launches by program: ours with ``correction=[tis_token,gsm]``, and verl's own, without any of our keys."""
    reference = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1"
    with application("correction=[tis_token,gsm]", f"{ROLLOUT}.name=vllm", reference, *NEEDED) as config:
        plain = changed(config, {})
        with open_dict(plain):
            for key in ("correction", "offpolicy", "setup"):
                del plain[key]
        yield {OURS: config, VERLS: plain}


def diagnosed(module: str, config: DictConfig, overrides: tuple[str, ...] = ()) -> Diagnosis:
    return judge(config, Launch(module, overrides), overrides)


def told(diagnosis: Diagnosis, case: Case) -> list[Any]:
    """Return the problems with the case's verdict and text, of the case's row."""
    if case.verdict == "NOTE":
        return [note for note in diagnosis.notes if case.said in str(note)]
    rows = [row for row in diagnosis.rows if row.name == case.row]
    return [each for row in rows for each in row.problems if each.verdict == case.verdict and case.said in str(each)]


def stops(config: DictConfig) -> bool:
    """Return True if the launch, or ``--check``, ends before anything is started."""
    try:
        prepare(changed(config, {}))
    except CheckError:
        return True
    return False


@pytest.mark.parametrize("name", each_nth_by_default(3, CASES))
def test_a_rule_is_triggered_and_its_fix_mends_it_when_it_is_pasted(name: str, bases: dict[str, DictConfig]) -> None:
    module, case = CASES[name]
    config = changed(bases[module], case.changes)
    diagnosis = diagnosed(module, config)
    problems = told(diagnosis, case)
    assert problems, (diagnosis.problems, diagnosis.notes)
    if case.verdict == "NOTE":
        assert diagnosis.status == 0
    else:
        (row,) = [row for row in diagnosis.rows if row.name == case.row]
        assert row.verdict == case.verdict
        assert diagnosis.status == {"NO-OP": 1, "ERROR": 2}[diagnosis.verdict]
    if module == OURS:  # one set of checks: the launch stops exactly where the doctor says ERROR
        assert stops(config) is (diagnosis.verdict == "ERROR"), diagnosis.problems
    for _ in range(3 if case.fixed else 0):  # what is fixed may show what stood behind it
        if unpasted := [problem for problem in problems if not problem.overrides]:
            assert all(problem.fix for problem in unpasted), problems  # either side of a conflict was asked for
            return
        config = with_overrides(config, [each for problem in problems for each in problem.overrides])
        if not (problems := told(diagnosed(module, config), case)):
            return
    assert not case.fixed, problems


def test_nothing_is_asked_for(bases: dict[str, DictConfig]) -> None:
    diagnosis = diagnosed(VERLS, bases[VERLS])
    assert (diagnosis.rows, diagnosis.status) == ((), 0)
    assert diagnosis.headline == "UNCORRECTED: verl.trainer.main_ppo with verl's own loss"


def test_a_part_that_does_not_read_mu_lives_without_it(bases: dict[str, DictConfig]) -> None:
    stale = {"correction.weight": None, "correction.masks": {"gsm": GSM | {"ratio": "ppo"}, "opsm": opsm(0.1)}}
    diagnosis = diagnosed(OURS, changed(bases[OURS], stale | {f"{ROLLOUT}.calculate_log_probs": False}))
    assert {row.name: row.verdict for row in diagnosis.rows} == {"masks.gsm": "OK", "masks.opsm": "ERROR"}


def test_another_trainer_and_another_release_are_not_known(
    bases: dict[str, DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(bases[VERLS], TIS_OF_VERL)
    diagnosis = diagnosed("verl.experimental.own_program.main_ppo", config)
    assert diagnosis.status == 2
    assert "the doctor did not check which keys it reads" in str(diagnosis.problems[0])
    # Its batch size is no value of verl's own trainer, and a run that asks for nothing is not wrong.
    plain = diagnosed("verl.experimental.own_program.main_ppo", changed(bases[VERLS], {"data.train_batch_size": 0}))
    assert (plain.status, plain.rows, [note.key for note in plain.notes]) == (0, (), ["module"])
    monkeypatch.setattr("verl_patches.execution_path.installed_release", lambda name: "0.10.0")
    diagnosis = diagnosed(VERLS, config)
    assert "verl=0.10.0: the doctor did not check which keys" in str(diagnosis.notes[0])


def test_an_untested_release_is_wrong_for_ours(bases: dict[str, DictConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("verl_patches.contract", "recipe.offpolicy.preflight.python_source"):
        monkeypatch.setattr(f"{module}.installed_release", lambda name: "0.10.0")
    diagnosis = diagnosed(OURS, bases[OURS])
    assert diagnosis.status == 2
    assert "installed release is 0.10.0" in str(diagnosis.problems[0])
    assert {row.verdict for row in diagnosis.rows} == {"ERROR"}
