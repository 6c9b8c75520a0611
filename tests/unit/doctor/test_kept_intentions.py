"""Fixes keep the purpose of a run, and what cannot be judged before the run is not an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipe.offpolicy.doctor.diagnosis import diagnose
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.doctor.show import Diagnosis
from recipe.offpolicy.preflight.checks import rollout
from recipe.offpolicy.preflight.python_source import OURS, VERLS
from tests.support.applications import NEEDED

pytestmark = [pytest.mark.verl("==0.9.1"), pytest.mark.usefixtures("each_actor_is_probed_once")]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODE = f"{ACTOR}.fsdp_config.router_replay.mode"
BOTH = "correction=[tis_token,gsm]"
KEY = "correction.centering"


def of(*overrides: str, module: str = OURS) -> Diagnosis:
    return diagnose(Launch(module, (f"{ROLLOUT}.name=vllm", *NEEDED, *overrides)))


@pytest.mark.parametrize("removal", ["correction.masks.gsm=null", "~correction.masks.gsm", "correction.masks=null"])
def test_a_part_that_is_null_is_removed(removal: str) -> None:
    found = of(BOTH, removal)
    assert (found.verdict, [row.name for row in found.rows]) == ("OK", ["weight"])


@pytest.mark.parametrize("sign", ["", "+"])
def test_a_removal_of_nothing_is_an_error(sign: str) -> None:
    (problem,) = of(BOTH, f"{sign}correction.masks.gms=null").problems
    assert (problem.key, problem.overrides) == ("correction.masks.gms", ())
    assert "Name one of gsm" in problem.fix


@pytest.mark.parametrize(
    ("key", "value", "fixed"),
    [
        (MODE, "r3", "R3"),
        (f"{ACTOR}.loss_agg_mode", "seq-mean-token-summ", "seq-mean-token-sum"),
        ("algorithm.adv_estimator", "null", None),
        ("offpolicy.delivery.probe", "five", "5"),
    ],
)
def test_a_misspelt_choice_becomes_the_nearest_not_the_default(key: str, value: str, fixed: str | None) -> None:
    problems = [each for each in of("correction=gsm", f"{key}={value}").problems if each.key == key]
    assert {override for each in problems for override in each.overrides} == ({f"{key}={fixed}"} if fixed else set())


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"])
def test_only_a_users_own_main_may_register_a_choice(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = '@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer")\ndef main(config): ...\n'
    (tmp_path / "own_main.py").write_text(f"import hydra\n{main}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    given = ("+correction@correction=gsm", f"{key}=mine")
    own, verls = (of(*given, module=module) for module in ("own_main", VERLS[0]))
    assert own.verdict == "OK"
    assert any(note.key == key and "may register it" in note.reason for note in own.notes)
    assert verls.verdict == "ERROR"


def test_more_likeliest_tokens_than_the_vocabulary_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 261, "hidden_size": 8}')
    given = ("correction=paper/score_centering", f"actor_rollout_ref.model.path={tmp_path}")
    for size, fixes in ((261, []), (262, ["correction.centering=261"])):
        problems = of(*given, f"correction.centering={size}").problems
        assert [each for problem in problems for each in problem.overrides if problem.key == KEY] == fixes


def test_routes_of_vllm_0_31_need_its_second_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    given = ("correction=gsm", f"{MODE}=R3", f"{ROLLOUT}.enable_rollout_routing_replay=true")

    def said() -> list[str]:
        found = of(*given)
        return [each.verdict for each in (*found.problems, *found.notes) if each.key == "VLLM_USE_V2_MODEL_RUNNER"]

    assert said() == []
    monkeypatch.setattr(rollout, "installed_release", lambda name: "0.31.0")
    assert said() == ["NOTE"]
    monkeypatch.setitem(os.environ, "VLLM_USE_V2_MODEL_RUNNER", "0")
    assert said() == ["ERROR"]
    monkeypatch.setitem(os.environ, "VLLM_USE_V2_MODEL_RUNNER", "1")
    assert said() == []
