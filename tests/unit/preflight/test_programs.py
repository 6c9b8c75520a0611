"""What verl's asynchronous programs do in other processes is refused, and adapters that never reach the engine."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.auto_choice import ETA_MATHS, select
from recipe.offpolicy.preflight.auto_setup import Setup
from recipe.offpolicy.preflight.checks.programs import check_lora, check_program
from tests.support.paths import ROOT

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
    config = OmegaConf.create({"actor_rollout_ref": {"model": model, "rollout": rollout}})
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
