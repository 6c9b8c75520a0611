"""What verl's asynchronous programs do in other processes is refused, and adapters that never reach the engine."""

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
SEPARATE = {"checkpoint_engine": {"backend": "nccl"}}


def tuned(release: str, model: dict[str, Any], rollout: dict[str, Any], own: dict[str, Any], strategy: str) -> Any:
    """The problems of a run with LoRA under a release, and those that are left once the first is fixed."""
    given = {"name": "vllm", "load_format": "dummy"} | rollout
    actor = {"strategy": strategy, "fsdp_config": {"strategy": "fsdp"}}
    config = OmegaConf.create({**own, "actor_rollout_ref": {"actor": actor, "model": model, "rollout": given}})
    found = list(check_lora(composed(config, CorrectionSpec(), live_path(config, release))))
    mended: Any = OmegaConf.merge(config, *(OmegaConf.from_dotlist(list(each.overrides)) for each in found))
    return found, list(check_lora(composed(mended, CorrectionSpec(), live_path(mended, release))))


@pytest.mark.parametrize("release", ["0.7.1", "0.8.0", "0.9.0", "0.9.1"])
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
@pytest.mark.parametrize("apart", [False, True], ids=["colocated", "separate"])
@pytest.mark.parametrize("merged", [False, True], ids=["adapters", "merged"])
def test_lora_is_delivered_or_refused(release: str, strategy: str, apart: bool, merged: bool) -> None:
    """vLLM loads adapters of colocated trainers; FSDP sends merged weights from 0.9.0 on, Megatron always."""
    model = {**BY_RANK, **MEGATRON} if strategy == "megatron" else BY_RANK
    model = OmegaConf.to_container(OmegaConf.merge(model, MERGED)) if merged else model  # type: ignore[assignment]
    found, left = tuned(release, model, SEPARATE if apart else {}, ENGINE, strategy)
    merges = strategy == "megatron" or release in ("0.9.0", "0.9.1")
    if (merges and merged) or (not apart and not merged):
        assert found == []
    elif merged:  # weights that are not merged are sent as adapters, if they can be
        assert [each.overrides for each in found] == [() if apart else ADAPTERS]
    else:
        assert [each.overrides for each in found] == [MERGE if merges else ()]
    assert left == [each for each in found if not each.overrides]
    assert all("use verl 0.9.1" in each.fix for each in left)


@pytest.mark.parametrize(
    ("release", "model", "rollout", "own", "strategy", "fix"),
    [
        ("0.9.1", {"lora_rank": 0}, SEPARATE, ENGINE, "fsdp", None),
        ("0.9.1", BY_RANK, {}, ONE_STEP_OFF, "fsdp", MERGE),
        ("0.9.1", BY_RANK, {"name": "trtllm"}, ENGINE, "fsdp", MERGE),
        ("0.8.0", BY_RANK, {"name": "trtllm"}, ENGINE, "fsdp", ()),
        ("0.9.1", BY_RANK, {"name": "sglang"}, ENGINE, "fsdp", None),
        ("0.7.1", BY_RANK, {"name": "sglang"}, ENGINE, "fsdp", ()),
        ("0.9.0", MEGATRON, {"name": "sglang"}, ENGINE, "megatron", MERGE),
        ("0.9.1", BY_RANK, {"checkpoint_engine": {"backend": "delta_sharded"}}, ENGINE, "fsdp",
         (f"{ROLLOUT}.checkpoint_engine.backend=nccl", *MERGE)),
        # A key that this engine does not read; the rank is 8 and alpha 32 there.
        ("0.9.1", {"lora": {"rank": 8, "alpha": 32}}, {}, ENGINE, "fsdp",
         (f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=32")),
        ("0.9.1", BY_RANK, {}, ENGINE, "megatron", (f"{MODEL}.lora.rank=32",)),
        ("0.9.1", {"lora_rank": 0, "lora_adapter_path": "/adapter"}, {}, ENGINE, "fsdp", ()),
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
