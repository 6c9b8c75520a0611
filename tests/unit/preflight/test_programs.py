"""Settings of verl's asynchronous programs that other processes would ignore are rejected, and so are adapters that
never reach the engine.
"""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.preflight.checks.path import check_lora
from tests.support.applications import composed
from verl_patches.execution_path import live_path

ONE_STEP_OFF: dict[str, Any] = {"rollout": {"nnodes": 1}}


MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
BY_RANK, MEGATRON, MERGED = {"lora_rank": 32}, {"lora": {"rank": 8}}, {"lora": {"merge": True}}
MERGE, ADAPTERS = (f"{MODEL}.lora.merge=true",), (f"{MODEL}.lora.merge=false",)
LEGACY = {"trainer": {"use_legacy_worker_impl": "auto"}}
ENGINE = {"trainer": {"use_legacy_worker_impl": "disable"}}


def tuned(release: str, model: dict[str, Any], rollout: dict[str, Any], own: dict[str, Any], strategy: str) -> Any:
    """The problems of a run with LoRA in a release, and those that are left after the first is fixed."""
    given = {"name": "vllm", "load_format": "dummy"} | rollout
    actor = {"strategy": strategy, "fsdp_config": {"strategy": "fsdp"}}
    config = OmegaConf.create({**own, "actor_rollout_ref": {"actor": actor, "model": model, "rollout": given}})
    found = list(check_lora(composed(config, CorrectionSpec(), live_path(config, release))))
    mended: Any = OmegaConf.merge(config, *(OmegaConf.from_dotlist(list(each.overrides)) for each in found))
    return found, list(check_lora(composed(mended, CorrectionSpec(), live_path(mended, release))))


@pytest.mark.parametrize(
    ("release", "model", "rollout", "own", "strategy", "fix"),
    [
        ("0.9.1", BY_RANK, {}, ONE_STEP_OFF, "fsdp", MERGE),
        ("0.9.1", BY_RANK, {"name": "trtllm"}, ENGINE, "fsdp", MERGE),
        ("0.9.1", BY_RANK, {"name": "sglang"}, ENGINE, "fsdp", None),
        ("0.7.1", BY_RANK, {"name": "sglang"}, ENGINE, "fsdp", ()),
        ("0.9.1", BY_RANK, {"checkpoint_engine": {"backend": "delta_sharded"}}, ENGINE, "fsdp",
         (f"{ROLLOUT}.checkpoint_engine.backend=nccl", *MERGE)),
        # A key that this engine does not read; the rank is 8 and alpha 32 there.
        ("0.9.1", {"lora": {"rank": 8, "alpha": 32}}, {}, ENGINE, "fsdp",
         (f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=32")),
        ("0.9.1", BY_RANK, {}, ENGINE, "megatron", (f"{MODEL}.lora.rank=32",)),
        ("0.7.1", BY_RANK, {}, LEGACY, "fsdp", (f"{ROLLOUT}.load_format=safetensors",)),
        ("0.7.1", {**BY_RANK, **MERGED}, {"load_format": "safetensors"}, LEGACY, "fsdp", ADAPTERS),
    ],
)  # fmt: skip
def test_lora_by_rollout_engine_and_key(
    release: str,
    model: dict[str, Any],
    rollout: dict[str, Any],
    own: dict[str, Any],
    strategy: str,
    fix: tuple[str, ...] | None,
) -> None:
    found, left = tuned(release, model, rollout, own, strategy)
    assert [each.overrides for each in found] == ([] if fix is None else [fix])
    assert left == [each for each in found if not each.overrides]
