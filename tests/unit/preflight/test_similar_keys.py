"""Overrides that were meant for us and would reach nothing, and those that merely look alike."""

from __future__ import annotations

import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.preflight.examination import examine
from recipe.offpolicy.preflight.hydra_groups import force_own_keys
from recipe.offpolicy.preflight.similar_keys import find_similar_keys, find_stray_options
from tests.support.applications import NEEDED, OPTIONS, application

MEANT = {
    "corection=gsm": "correction=gsm",
    "+corection=gsm": "correction=gsm",
    "++Correction=gsm": "correction=gsm",
    "+corrections=gsm": "correction=gsm",
    "+corrections=[tis_token,gsm]": "correction=[tis_token,gsm]",
    "+correction/masks=gsm": "correction=gsm",
    "correction@algorithm=gsm": "correction=gsm",
    "+correction_masks.gsm.upper=1.02": "correction.masks.gsm.upper=1.02",
    "corection.masks.gsm.upper=1.02": "correction.masks.gsm.upper=1.02",
    "+algorithm.correction=gsm": "correction=gsm",
    "+trainer.correction=gsm": "correction=gsm",
    "+actor_rollout_ref.rollout.correction=gsm": "correction=gsm",
    "+actor_rollout_ref.actor.correction.weight.upper=3.0": "correction.weight.upper=3.0",
    "+off_policy.shadow=[gsm]": "offpolicy.shadow=[gsm]",
    "+offpolicy_shadow=[gsm]": "offpolicy.shadow=[gsm]",
    "+setup_model=dense": "setup.model=dense",
    "+setups.model=dense": "setup.model=dense",
}


@pytest.mark.parametrize(("argument", "spelling"), MEANT.items())
def test_a_key_that_resembles_ours_is_answered_by_the_right_spelling(argument: str, spelling: str) -> None:
    (problem,) = find_similar_keys(["data.train_batch_size=8", argument], OPTIONS)
    assert problem.key == argument.partition("=")[0]
    assert problem.verdict == "ERROR"
    assert problem.fix.startswith(f"Write {spelling} in its place")


@pytest.mark.parametrize("argument", MEANT)
def test_nothing_is_composed_with_it(argument: str) -> None:
    with pytest.raises(CheckError, match="nothing would read it"):
        force_own_keys([argument])


@pytest.mark.parametrize(
    "argument",
    [
        "correction=gsm",
        "correction.masks.gsm.upper=1.02",
        "++correction.masks.gsm.uper=1.02",  # an unknown key of ours, which our own checks answer
        "offpolicy.shadow=[gsm]",
        "+setup.engine=same",
        "~correction",
        "algorithm.rollout_correction.rollout_is=token",
        "+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is=token",
        "trainer.v1.sampler.max_off_policy_threshold=4",
        "+env.setup.model=x",  # a section of the user's own
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.correction=gsm",
        "+ray_kwargs.ray_init.correction=gsm",
        "+actor_rollout_ref.model.override_config.correction=gsm",
        "--config-name=correction",
        "--correction=gsm",
        "hydra.run.dir=outputs/corrections",
    ],
)
def test_what_is_ours_or_somebody_elses_passes(argument: str) -> None:
    assert list(find_similar_keys([argument], OPTIONS)) == []


def keys_of(node: Any, path: str = "") -> list[str]:
    keys = []
    for name, value in node.items() if isinstance(node, dict) else ():
        key = f"{path}.{name}" if path else str(name)
        keys += [key, *keys_of(value, key)]
    return keys


@pytest.mark.slow
def test_no_key_of_verl_resembles_ours() -> None:
    with application(*NEEDED) as config:
        verls = keys_of(OmegaConf.to_container(config))
    assert len(verls) > 500
    assert list(find_similar_keys([f"{key}=1" for key in verls], OPTIONS)) == []


def stray(argument: str, *there: str) -> list[str]:
    return [problem.key for problem in find_stray_options([argument], OPTIONS, there.__contains__)]


def test_an_added_key_with_the_name_of_a_correction() -> None:
    assert stray("+trainer.foo=gsm") == ["+trainer.foo"]
    assert stray("++algorithm.mask=[tis_token,gsm]") == ["++algorithm.mask"]
    assert stray("+algorithm.mask='gsm'") == ["+algorithm.mask"]


@pytest.mark.parametrize(
    "argument",
    [
        "trainer.experiment_name=gsm",  # not added
        "+trainer.kind=none",  # words that other keys take too
        "+trainer.kind=auto",
        "+trainer.kind=bypass",
        "+trainer.kind=reuse",
        "+trainer.kind=gsm8k",
        "+trainer.record.dir=recording",
        "+correction.masks.x=gsm",  # ours: answered by our own checks
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kind=gsm",
    ],
)
def test_other_values_and_other_keys_pass(argument: str) -> None:
    assert stray(argument) == []


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("+kl_clip=0.2", "correction.kl_clip=0.2"),
        ("++masks.gsm.upper=1.02", "correction.masks.gsm.upper=1.02"),
        ("+record.dir=recording", "offpolicy.record.dir=recording"),
    ],
)
def test_a_key_of_ours_without_its_section(argument: str, written: str) -> None:
    """Hydra advises the plus, and nothing would read it."""
    (problem,) = find_stray_options([argument], OPTIONS, ().__contains__)
    assert problem.fix.startswith(f"Write {written} in its place")
    top = re.split("[.=]", argument.lstrip("+"))[0]
    assert stray(argument, top) == [], "a section of the user's own"


def test_a_key_that_is_there_is_not_added() -> None:
    """dppo_tv is a loss of verl's by the name of an option."""
    argument = "++actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv"
    assert stray(argument, "actor_rollout_ref.actor.policy_loss.loss_mode") == []
    assert stray(argument) == [argument.partition("=")[0]]


@pytest.mark.slow
def test_a_launch_with_a_stray_option_stops() -> None:
    mode = "++actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv"
    with application("correction=gsm", "+trainer.mask=icepop", mode, *NEEDED) as config:
        (problem,) = examine(config, ["correction=gsm", "+trainer.mask=icepop", mode]).stopping
    assert str(problem).startswith("+trainer.mask=icepop: an added key that nothing of ours reads")
