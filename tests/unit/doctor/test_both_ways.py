"""Our own program and verl's, with the same options of ours, compose the same run."""

from __future__ import annotations

import random
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.doctor.launch import compose
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.preflight.hydra_groups import read_chosen_options
from recipe.offpolicy.preflight.python_source import OURS
from tests.support.examples import each_nth_by_default
from tests.support.paths import ROOT
from verl_patches.hydra_sections import GROUPS

GIVEN = (
    "data.train_files=train.parquet",
    "data.val_files=heldout.parquet",
    "actor_rollout_ref.model.path=model",
    "offpolicy.record.dir=there",
    "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R2",
)
"""Our keys with these options; the last key comes from one of our groups."""
MOST = 4
"""Number of options drawn from a group; a composition takes a third of a second."""


def draw_options(group: str) -> list[str]:
    names = sorted(file.stem for file in (ROOT / "configs" / group).glob("*.yaml"))
    # It brings the sections, which our own program has.
    names = [name for name in names if (group, name) != ("offpolicy", "default")]
    return random.Random(group).sample(names, min(MOST, len(names)))


def composed(program: str, *overrides: str) -> Any:
    config = compose(Launch(program, (*overrides, *GIVEN)))
    plain: Any = OmegaConf.to_container(config, resolve=False)
    plain.pop("hydra", None)
    return plain


@pytest.mark.slow
@pytest.mark.verl(">=0.9.1")
@pytest.mark.parametrize("group", each_nth_by_default(3, GROUPS))
def test_an_option_means_the_same_in_both(group: str) -> None:
    for name in draw_options(group):
        theirs = composed("verl.trainer.main_ppo", f"+{group}@{group}={name}")
        assert composed(OURS, f"{group}={name}") == theirs, name


@pytest.mark.verl(">=0.9.1")
def test_the_sections_alone_correct_nothing() -> None:
    composed("verl.trainer.main_ppo", "+offpolicy@offpolicy=default")
    assert read_chosen_options() == ["none"]


@pytest.mark.verl(">=0.9.1")
def test_a_correction_given_twice_is_refused() -> None:
    composed("verl.trainer.main_ppo", "+correction@correction=[tis_token,gsm]", "+correction@correction=opsm")
    with pytest.raises(SpecError, match=r"given 2 times.*correction@correction=\[tis_token,gsm,opsm\]"):
        read_chosen_options()
