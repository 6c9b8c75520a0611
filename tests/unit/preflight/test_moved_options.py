"""Presets are in folders; a former name is answered, wherever it is given, with the name that composes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.doctor.launch import compose as compose_launch
from recipe.offpolicy.doctor.program import Launch, LaunchError
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.preflight.hydra_groups import load_option, refuse_moved
from recipe.offpolicy.preflight.python_source import OURS
from recipe.offpolicy.preflight.resolve import resolve
from tests.support.applications import CONFIGS, NEEDED, OPTIONS, application
from verl_patches.hydra_sections import bring_sections
from verl_patches.moved_options import MOVED, explain_moved

VERL = "verl.trainer.main_ppo"


@pytest.mark.slow
@pytest.mark.parametrize("old", MOVED)
def test_every_former_name_is_answered_with_one_that_composes(old: str, folder: Path) -> None:
    """Alone and in a list, by Hydra's error, and by the functions that look up an option."""
    new = MOVED[old]
    assert old not in OPTIONS
    for written, today in ((old, new), (f"[gsm,{old}]", f"[gsm,{new}]")):
        said = explain_moved(f"correction/{old}", ["x=1", f"correction={written}"])
        assert said.startswith(f"correction={written}: {old} is now {new}. Set ")
        assert f"correction={today}" in said
    with application(folder=folder):
        with pytest.raises(SpecError, match=f"correction={old}: {old} is now {new}. Set correction={new}"):
            load_option(old)
        assert load_option(new) == OmegaConf.load(CONFIGS / "correction" / f"{new}.yaml")


def launch(module: str, override: str) -> Callable[[Path], object]:
    return lambda folder: compose_launch(Launch(module, (override, *NEEDED)))


def any_program(folder: Path) -> object:
    """No code of ours runs before verl's main, so the plugin answers."""
    bring_sections()
    (folder / "mine.yaml").write_text("a: 1\n")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base=None):
        return compose("mine", ["+correction@correction=[gsm,m2po]"])


def resolved(override: str) -> Callable[[Path], object]:
    def build(folder: Path) -> object:
        with application("correction=gsm", override, folder=folder) as config:
            return resolve(Composed(config), print)

    return build


@pytest.mark.parametrize(
    ("ask", "written", "fix"),
    [
        (launch(OURS, "correction=[gsm,m2po]"), "correction=[gsm,m2po]", "'correction=[gsm,paper/m2po]'"),
        (
            launch(VERL, "+correction@correction=[gsm,m2po]"),
            "+correction@correction=[gsm,m2po]",
            "'+correction@correction=[gsm,paper/m2po]'",
        ),
        (any_program, "+correction@correction=[gsm,m2po]", "'+correction@correction=[gsm,paper/m2po]'"),
        (
            resolved("offpolicy.shadow=[icepop,m2po]"),
            "offpolicy.shadow=[icepop,m2po]",
            "offpolicy.shadow=[icepop, paper/m2po]",
        ),
    ],
)
def test_each_place_that_takes_a_name_answers(
    ask: Callable[[Path], object], written: str, fix: str, folder: Path
) -> None:
    with pytest.raises((SpecError, LaunchError, MissingConfigException)) as caught:
        ask(folder)
    assert str(caught.value) == f"{written}: m2po is now paper/m2po. Set {fix}."


def test_an_option_of_the_users_own_may_have_a_former_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "correction").mkdir()
    (tmp_path / "correction" / "m2po.yaml").write_text("masks: {mine: {ratio: ppo}}\n")
    place = f"hydra.searchpath=[file://{tmp_path}]"
    with application("correction=[gsm,m2po]", place, folder=folder) as config:
        assert set(config.correction.masks) == {"gsm", "mine"}
        assert set(load_option("m2po")["masks"]) == {"mine"}
        refuse_moved("offpolicy.shadow", ["m2po", "gsm"])
        with pytest.raises(SpecError, match=r"Set offpolicy\.shadow=\[m2po, paper/kpop\]"):
            refuse_moved("offpolicy.shadow", ["m2po", "kpop"])
