"""The chosen primary configuration has our sections, and a user's search path still reaches verl's."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.doctor.launch import parse_flags
from recipe.offpolicy.preflight.hydra_refusals import check_primary, keep_search_path
from recipe.offpolicy.preflight.own_keys import CONFIG_DIR


def check(arguments: list[str]) -> None:
    check_primary(parse_flags(arguments))


GIVE_MEGATRON = "Give --config-name=offpolicy_megatron_trainer, and no --config-path"
OF_VERL = "verl's own primary configuration, which has no section for a correction."


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        # As launch scripts of verl have it.
        (
            ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"],
            f"--config-name=ppo_megatron_trainer.yaml: {OF_VERL} {GIVE_MEGATRON}.",
        ),
        (
            ["--config-name=fully_async_ppo_megatron_trainer"],
            f"--config-name=fully_async_ppo_megatron_trainer: there is no such file in {CONFIG_DIR}. Name its folder "
            "with --config-dir, or launch the program that it belongs to, with '+correction@correction=[...]'.",
        ),
    ],
)
def test_another_programs_configuration_names_ours(flags: list[str], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        check(flags)
    assert str(caught.value) == said


def test_a_configuration_of_verls_by_its_whole_path(tmp_path: Path) -> None:
    folder = tmp_path / "verl" / "trainer" / "config"
    folder.mkdir(parents=True)
    (folder / "ppo_trainer.yaml").write_text("trainer: {}\n")
    with pytest.raises(SpecError, match="verl's own primary configuration"):
        check([f"--config-path={folder}", "--config-name=ppo_trainer"])


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--config-name=offpolicy_megatron_trainer"],
        ["--config-path=pkg://mine", "--config-name=run"],
    ],
)
def test_what_has_our_sections_or_cannot_be_told_passes(flags: list[str]) -> None:
    check(flags)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("hydra.searchpath=[pkg://a.b]", "hydra.searchpath=[pkg://a.b,pkg://verl.trainer.config]"),
        ("++hydra.searchpath=[]", "++hydra.searchpath=[pkg://verl.trainer.config]"),
        ("hydra.searchpath=[pkg://verl.trainer.config]", "hydra.searchpath=[pkg://verl.trainer.config]"),
        ("a.b=[hydra.searchpath=]", "a.b=[hydra.searchpath=]"),
    ],
)
def test_a_search_path_of_the_users_is_kept_beside_verls(given: str, kept: str) -> None:
    assert keep_search_path(["x.y=1", given]) == ["x.y=1", kept]
