"""What verl's FSDP engine sends in a weight synchronisation with LoRA; ``check_lora`` relies on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training_worker import join_process_group, parameters, start_worker, tiny_model
from verl_patches.contract import demand_release
from verl_patches.releases import attributes_of

RANK, ALPHA = 4, 8
MODULE = "layers.1.mlp.down_proj"


def send(folder: Path, *, merge: bool, adapter: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what a worker with a trained adapter sends, either only the adapter or all weights, and its parameters."""
    join_process_group()
    worker = start_worker(
        tiny_model(folder), lora_rank=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora={"merge": merge}
    )
    with torch.no_grad():
        for name, parameter in worker.engine.module.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    sent: Any = worker.engine.get_per_tensor_param(base_sync_done=adapter)[0]
    return {name: tensor.float().clone() for name, tensor in sent}, parameters(worker)


def of_module(tensors: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    (found,) = (tensor for name, tensor in tensors.items() if MODULE in name and name.endswith(kind))
    return found


@pytest.mark.parametrize("adapter", [True, False], ids=["colocated", "by a checkpoint engine"])
def test_merged_weights_are_sent_from_0_9_on(adapter: bool, tmp_path: Path) -> None:
    sent, held = send(tmp_path, merge=True, adapter=adapter)
    base, down = of_module(held, "base_layer.weight"), of_module(held, "lora_A.default.weight")
    merged = base + ALPHA / RANK * torch.full((base.shape[0], RANK), 0.5) @ down
    assert float((merged - base).abs().max()) > 0.1
    expected = merged if attributes_of(demand_release()).merged_lora else base
    # Sent in bfloat16.
    assert torch.allclose(of_module(sent, f"{MODULE}.weight"), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("adapter", [True, False], ids=["colocated", "by a checkpoint engine"])
def test_an_adapter_is_sent_to_a_colocated_engine_alone(adapter: bool, tmp_path: Path) -> None:
    sent, held = send(tmp_path, merge=False, adapter=adapter)
    assert any("lora_" in name for name in sent) is adapter
    if adapter:
        assert torch.equal(of_module(sent, "lora_A.weight"), of_module(held, "lora_A.default.weight"))
