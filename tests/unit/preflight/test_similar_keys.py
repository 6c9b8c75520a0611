"""Overrides that were meant for us but would have no effect, and those that merely look similar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.preflight.hydra_groups import force_own_keys
from recipe.offpolicy.preflight.own_keys import (
    find_similar_keys,
    find_stray_keys,
    list_paths,
    list_sections,
    list_verls_names,
)
from tests.support.applications import NEEDED, OPTIONS, application

ROUTER_REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    with application(*NEEDED) as config:
        yield config


def found(argument: str, base: DictConfig, *registered: str) -> list[Any]:
    """Return the answer to an added override, before or after Hydra composes."""
    return list(find_similar_keys([argument])) or list(find_stray_keys([argument], base, OPTIONS, registered))


# What is given -> how it is written.
MEANT = {
    "corection=gsm": "correction=gsm",
    "+algorithm.correction=gsm": "correction=gsm",
    "+correction_weight.upper=3": "correction.weight.upper=3",
    "+actor_rollout_ref.actor.router_replay.mode=R3": f"{ROUTER_REPLAY}=R3",
    "+trainer.setup.model=dense": "setup.model=dense",
    "+length_penality=anchor": "length_penalty=anchor",
    "router_replay=R3": f"{ROUTER_REPLAY}=R3",
    "+mode@trainer=separate_async_cpu": "+mode=separate_async_cpu",
    "+trainer.too_olds=mask": "offpolicy.staleness.too_old=mask",
    "+gsm.upper=1.02": "correction.masks.gsm.upper=1.02",
    "++algorithm.mask=[tis_token,gsm]": "correction=[tis_token,gsm]",
}


@pytest.mark.parametrize(("argument", "spelling"), MEANT.items())
def test_a_key_that_resembles_ours_is_answered_by_the_right_spelling(
    argument: str, spelling: str, base: DictConfig
) -> None:
    (problem,) = found(argument, base)
    assert problem.key == argument.partition("=")[0]
    assert problem.verdict == "ERROR"
    assert problem.fix.startswith((f"Write {spelling},", f"Write {spelling} instead"))
    assert not problem.overrides


SECTIONS = sorted(
    path
    for path, holds_keys in list_paths().items()
    if holds_keys and path[0] in list_sections() and path[-1] not in {*list_verls_names(), "weight", "weights"}
)


@pytest.mark.slow
@pytest.mark.parametrize("section", [path for path in SECTIONS if len(path) < 3 and len(path[-1]) > 4], ids=".".join)
@pytest.mark.parametrize("typo", ["{}s", "{}_", "{}"])
@pytest.mark.parametrize("parent", ["", "algorithm.", "trainer.v1."])
def test_every_section_is_recognised_where_it_does_not_belong(
    section: tuple[str, ...], typo: str, parent: str, base: DictConfig
) -> None:
    """Sections come from the registry and the YAML, so a new section is covered."""
    key = f"{parent}{typo.format(section[-1])}.x"
    if key != f"{section[0]}.x":
        (problem,) = found(f"+{key}=1", base)
        assert (problem.verdict, f"resembles {'.'.join(section)}.x." in problem.reason) == ("ERROR", True), problem


@pytest.mark.parametrize("key", ["tis_token.upper", "trainer.icepop.lower", "correction_wait.upper"])
def test_an_added_key_that_names_a_correction_is_an_error(key: str, base: DictConfig) -> None:
    (problem,) = found(f"+{key}=3", base)
    assert (problem.verdict, "correction" in problem.fix) == ("ERROR", True)


@pytest.mark.parametrize(
    "argument",
    [
        "correction=gsm",
        "++correction.masks.gsm.uper=1.02",  # an unknown key of ours, which our own checks answer
        "+opd=loss",
        "+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is=token",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.correction=gsm",
        "+reward.reward_kwargs.overlong_buffer_cfg.enable=true",
        "--config-name=correction",
        f"+{ROUTER_REPLAY}=R3",
        "+trainer.logger=none",  # a word that other keys take too
    ],
)
def test_what_is_ours_or_somebody_elses_passes(argument: str, base: DictConfig) -> None:
    assert found(argument, base) == []


def test_a_section_of_the_users_own_is_no_problem(base: DictConfig) -> None:
    (note,) = found("+env.setup.model=x", base)
    assert note.verdict == "NOTE"
    assert found("+tempo.bpm=3", base, "tempo") == []
    (problem,) = found("+tempoo.bpm=3", base, "tempo")
    assert problem.verdict == "ERROR"
    assert problem.fix.startswith("Write +tempo.bpm=3,")


@pytest.mark.verl(">=0.9")
def test_fields_of_verls_dataclasses_are_taken_and_others_are_not(base: DictConfig) -> None:
    rollout = "actor_rollout_ref.rollout"
    assert found(f"+{rollout}.repetition_penalty=1.0", base) == []
    assert found(f"+{rollout}.agent.agent_loop_manager_class=a.B", base) == []
    (problem,) = found(f"+{rollout}.max_turns=2", base)
    assert problem.verdict == "ERROR"
    assert problem.reason == "verl rejects it: RolloutConfig has no field max_turns."


def keys_of(node: Any, path: str = "") -> list[str]:
    keys = []
    for name, value in node.items() if isinstance(node, dict) else ():
        key = f"{path}.{name}" if path else str(name)
        keys += [key, *keys_of(value, key)]
    return keys


@pytest.mark.slow
def test_no_key_of_verl_resembles_ours(base: DictConfig) -> None:
    sections = {*list_sections(), "offpolicy"}
    verls = [key for key in keys_of(OmegaConf.to_container(base)) if key.split(".")[0] not in sections]
    assert len(verls) > 500
    assert list(find_similar_keys([f"{key}=1" for key in verls])) == []
    # A release without this section has none of its keys.
    for name in ("trainer", "algorithm", "data"):
        inner = [f"+{key}=1" for key in verls if key.startswith(f"{name}.")]
        bare = OmegaConf.create({**base, name: {"experiment_name": None}})
        assert [each for each in find_stray_keys(inner, bare, OPTIONS) if each.verdict == "ERROR"] == []


@given(text=st.text("abcdefgs_.+@/=", min_size=1, max_size=12))
def test_no_line_is_too_odd(text: str) -> None:
    found(f"+{text}=1", OmegaConf.create({"trainer": {"a": 1}}))


@pytest.mark.parametrize("key", ["offpolicy.record.dir", "offpolicy.shadow", "opd.teacher.url", "correction", "opd"])
def test_a_key_of_ours_without_a_value_is_refused(key: str) -> None:
    """``key=$UNSET`` gives such a key."""
    with pytest.raises(CheckError, match=f"{key}='': empty"):
        force_own_keys([f"{key}="])
