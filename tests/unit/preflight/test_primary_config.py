"""The primary configuration that is named has our sections, and a search path of the user's leaves verl's in reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.preflight.hydra_refusals import check_primary, keep_search_path
from recipe.offpolicy.preflight.own_keys import CONFIG_DIR

GIVE_OURS = "Give --config-name=offpolicy_trainer, and no --config-path"
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
        (["--config-path", "./config", "-cn", "ppo_trainer"], f"--config-name=ppo_trainer: {OF_VERL} {GIVE_OURS}."),
        (["a.b=1", "--config-name=ppo_trainer", "c.d=2"], f"--config-name=ppo_trainer: {OF_VERL} {GIVE_OURS}."),
        (
            ["--config-name=fully_async_ppo_megatron_trainer"],
            f"--config-name=fully_async_ppo_megatron_trainer: there is no such file in {CONFIG_DIR}. Name its folder "
            "with --config-dir, or launch the program that it belongs to, with '+correction@correction=[...]'.",
        ),
    ],
)
def test_another_programs_configuration_names_ours(flags: list[str], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_primary(flags)
    assert str(caught.value) == said


def test_a_configuration_of_verls_by_its_whole_path(tmp_path: Path) -> None:
    folder = tmp_path / "verl" / "trainer" / "config"
    folder.mkdir(parents=True)
    (folder / "ppo_trainer.yaml").write_text("trainer: {}\n")
    with pytest.raises(SpecError, match="verl's own primary configuration"):
        check_primary([f"--config-path={folder}", "--config-name=ppo_trainer"])


@pytest.mark.parametrize(
    ("content", "reaches"),
    [
        ("defaults: [ppo_trainer, _self_]\n", False),
        ("defaults: [ppo_trainer, other, _self_]\n", False),
        ("trainer: {nnodes: 1}\n", False),
        ("defaults: [ppo_trainer, offpolicy_base, _self_, {correction: gsm}]\n", True),
        ("defaults: [offpolicy_megatron_trainer, _self_]\n", True),
        ("defaults: [inner, _self_]\n", True),
        ("defaults: [{override correction: gsm}]\n", True),
        ("correction: {weight: null}\n", True),
        ("defaults: [{\n", True),  # Hydra says what is wrong with it
    ],
)
def test_a_configuration_of_the_users(content: str, reaches: bool, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    (tmp_path / "inner.yaml").write_text("defaults: [offpolicy_base]\n")
    (tmp_path / "other.yaml").write_text("defaults: [mine]\n")  # in a circle
    for flag in ("--config-dir", "--config-path"):
        flags = [flag, str(tmp_path), "--config-name", "mine"]
        if reaches:
            check_primary(flags)
            continue
        with pytest.raises(SpecError) as caught:
            check_primary(flags)
        check_primary([*flags, "+correction@correction=[gsm]"])
        fix = "Give options of ours as '+correction@correction=[...]', which adds the sections to it."
        assert str(caught.value) == f"--config-name=mine: {file} has no section for a correction. {fix}"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["correction=gsm"],
        ["--config-name=offpolicy_megatron_trainer"],
        ["--config-name=quickstart.yaml"],
        ["--config-path=pkg://mine", "--config-name=run"],
        ["hydra.searchpath=[file:///mine]", "--config-name=run"],
        ["--config-name"],  # which Hydra refuses itself
    ],
)
def test_what_has_our_sections_or_cannot_be_told_passes(flags: list[str]) -> None:
    check_primary(flags)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("hydra.searchpath=[pkg://a.b]", "hydra.searchpath=[pkg://a.b,pkg://verl.trainer.config]"),
        ("hydra.searchpath=[file:///x, pkg://a]", "hydra.searchpath=[file:///x, pkg://a,pkg://verl.trainer.config]"),
        ("++hydra.searchpath=[]", "++hydra.searchpath=[pkg://verl.trainer.config]"),
        ("hydra.searchpath=[pkg://verl.trainer.config]", "hydra.searchpath=[pkg://verl.trainer.config]"),
        ("hydra.run.dir=/x", "hydra.run.dir=/x"),
        ("a.b=[hydra.searchpath=]", "a.b=[hydra.searchpath=]"),
    ],
)
def test_a_search_path_of_the_users_is_kept_beside_verls(given: str, kept: str) -> None:
    assert keep_search_path(["x.y=1", given]) == ["x.y=1", kept]
