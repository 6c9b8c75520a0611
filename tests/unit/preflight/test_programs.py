"""What verl's asynchronous programs do in other processes is refused, and adapters that never reach the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.auto_choice import ETA_MATHS, select
from recipe.offpolicy.preflight.auto_setup import Setup
from recipe.offpolicy.preflight.checks.programs import check_lora, check_program
from recipe.offpolicy.preflight.checks.staleness import is_asynchronous, mixes_unknown_versions
from recipe.offpolicy.preflight.hydra_groups import brought_sections
from tests.support.paths import ROOT
from verl_patches.hydra_sections import bring_sections

FULLY_ASYNC: dict[str, Any] = {"async_training": {"require_batches": 1}}
ONE_STEP_OFF: dict[str, Any] = {"rollout": {"nnodes": 1}}


@pytest.mark.parametrize(
    ("own", "refused"),
    [(FULLY_ASYNC, ["length_penalty"]), (ONE_STEP_OFF, []), ({}, [])],
    ids=["fully", "one step", "main"],
)
def test_extensions_are_refused_where_another_process_takes_prompts(own: dict[str, Any], refused: list[str]) -> None:
    shipped = OmegaConf.load(ROOT / "configs" / "length_penalty" / "anchor.yaml")
    config = OmegaConf.create({**own, "length_penalty": shipped, "offpolicy": {"extensions": {}}})
    assert isinstance(config, DictConfig)
    assert [problem.key for problem in check_program(config, CorrectionSpec())] == refused


@pytest.mark.parametrize(
    ("model", "backend", "delivered"),
    [
        ({"lora_rank": 32}, "nccl", False),
        ({"lora": {"rank": 8}}, "cpu_files", False),
        ({"lora_rank": 32, "lora": {"merge": True}}, "nccl", True),
        ({"lora_rank": 32}, "naive", True),
        ({"lora_rank": 0}, "nccl", True),
    ],
)
def test_adapters_that_a_checkpoint_engine_leaves_out_are_refused(
    model: dict[str, Any], backend: str, delivered: bool
) -> None:
    rollout = {"checkpoint_engine": {"backend": backend}}
    actor = {"strategy": "fsdp"}
    config = OmegaConf.create({"actor_rollout_ref": {"actor": actor, "model": model, "rollout": rollout}})
    found = list(check_lora(config, CorrectionSpec()))
    fix = ("actor_rollout_ref.model.lora.merge=true",)
    assert [each.overrides for each in found] == ([] if delivered else [fix])
    mended = OmegaConf.merge(config, OmegaConf.from_dotlist(list(fix)))
    assert isinstance(mended, DictConfig)
    assert list(check_lora(mended, CorrectionSpec())) == []


def test_auto_reads_the_programs_own_limit_of_staleness() -> None:
    run: dict[str, Any] = {"engine": "different", "mode": "async", "model": "dense", "trajectory": "single"}
    found = select(Setup(**run, minibatches=1, strategy="fsdp", program="fully_async"))
    # Rollouts run ahead by the threshold, and one version passes while they train.
    (required,) = found.requires
    assert (required.key, required.value) == ("async_training.staleness_threshold", ETA_MATHS - 1)
    assert select(Setup(**run, minibatches=1, strategy="fsdp", program="one_step_off")).requires == ()


@pytest.mark.parametrize(
    ("own", "v1", "mixes"),
    [(FULLY_ASYNC, False, False), (ONE_STEP_OFF, False, False), ({}, True, False), ({}, False, False)],
)
@pytest.mark.verl(">=0.9.1")
def test_every_asynchronous_way_of_the_newest_release_says_which_version_sampled_a_token(
    own: dict[str, Any], v1: bool, mixes: bool
) -> None:
    """By its client, or because a row of one_step_off_policy is sampled by one version."""
    trainer = {"use_v1": v1, "v1": {"trainer_mode": "colocate_async"}}
    actor = {"strategy": "fsdp", "ppo_mini_batch_size": 8}
    config = OmegaConf.create({**own, "trainer": trainer, "actor_rollout_ref": {"actor": actor}})
    assert mixes_unknown_versions(config) is mixes
    assert is_asynchronous(config) is (bool(own) or v1)


def test_an_option_of_ours_is_known_to_have_brought_the_sections(tmp_path: Path) -> None:
    bring_sections()
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    for overrides, brought in (["+correction@correction=gsm"], True), ([], False):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(tmp_path), version_base=None):
            HydraConfig.instance().set_config(compose("mine", overrides, return_hydra_config=True))
        assert brought_sections() is brought
    GlobalHydra.instance().clear()
