"""Patches of Megatron and mbridge, which expect CUDA and Transformer Engine; installed when targets are imported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ..contract import Contract, logger
from ..deferred import ReleasePatch, after_import, is_awaited
from . import build

_megatron = partial(build, of=("megatron-core", "==0.16.*"))
_mbridge = partial(build, of=("mbridge", "==0.15.*"))
_RANDOM, _OPTIMIZER = "megatron.core.tensor_parallel.random", "megatron.core.optimizer"

# Replacements for the functions of `torch.cuda` that Megatron calls, for a PyTorch built without CUDA. On any device,
# Megatron asks `torch.cuda` for the device on which to allocate, synchronises it and seeds it. The replacements are
# installed when a process sets up Megatron's process groups. Importing verl also imports Megatron; a process that only
# imports it keeps PyTorch's own functions, which raise an error without CUDA.


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing; replaces calls that are meaningless on the CPU."""


STAND_INS: dict[str, Callable[..., Any]] = {
    # Megatron passes the result to `device=` and to `.to()`.
    "current_device": lambda: torch.device("cpu"),
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda new_state, *_, **__: torch.set_rng_state(new_state),
}


def _initialize(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if not torch.cuda.is_available():
        for name, stand_in in STAND_INS.items():
            setattr(torch.cuda, name, stand_in)
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
        logger.info("patch %s in force: the CPU replaces torch.cuda", "megatron_cuda")
    original(*args, **kwargs)


def _get_rng_state(original: Callable[..., Any], *_: Any, **__: Any) -> torch.Tensor:
    """Keep Megatron's CUDA random states in the CPU's generator.

    Megatron forks random states with two functions that access CUDA's generators. verl seeds the states, and attention
    forks them at every layer, even without dropout.
    """
    return torch.get_rng_state()


def _set_rng_state(original: Callable[..., Any], new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


@contextmanager
def _named_as_cuda() -> Iterator[None]:
    """Make `Tensor.type()` return "torch.cuda.FloatTensor" for "torch.FloatTensor" inside the block."""

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = inherited(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    inherited = torch.Tensor.type
    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = inherited  # type: ignore[method-assign]


def _while_named(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let Megatron's optimizers accept parameters on the CPU.

    The optimizers check `param.type()`. They accept only "torch.cuda.FloatTensor" and its 16-bit variants, and raise an
    error for "torch.FloatTensor". During this check, the patch makes `Tensor.type()` return the name of the CUDA type.
    """
    with _named_as_cuda():
        return original(*args, **kwargs)


def _attend(
    original: Callable[..., torch.Tensor],
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Let Megatron's own attention accept the padding mask that verl creates for Transformer Engine.

    Without Transformer Engine, Megatron uses its local layers. verl's padded batches have a mask of shape (batch,
    sequence). Transformer Engine ignores this mask for causal attention, whereas the local attention would broadcast it
    over the scores. In rows that are padded on the right, causal attention never attends to padding, so the causal mask
    alone is exact. The local attention creates a causal mask if it receives no mask.
    """
    if attention_mask is not None and attention_mask.dim() == 2:
        if bool((~attention_mask[:, :-1].bool() & attention_mask[:, 1:].bool()).any()):
            raise ValueError(
                "the padding mask that reached Megatron's attention has padding before a token. Without Transformer "
                "Engine, pad sequences only on the right."
            )
        attention_mask = None
    return original(self, query, key, value, attention_mask, *args, **kwargs)


# mbridge requests Transformer Engine's layers and uses their weight names. In those layers, the norm before a linear
# layer is part of the linear layer, whereas in the local layers it is separate.
FUSED_NAMES = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
"""Name of a norm's weight in the local layers -> its name in Transformer Engine's layers."""


def _local_layers(original: Callable[..., Any], config: Any, use_transformer_engine: bool, **kwargs: Any) -> Any:
    return original(config, use_transformer_engine=False, **kwargs)


def _fused_name(original: Callable[..., list[str]], self: Any, mcore_weights_name: str) -> list[str]:
    for local, fused in FUSED_NAMES.items():
        mcore_weights_name = mcore_weights_name.replace(local, fused)
    return original(self, mcore_weights_name)


def _init_bridge(original: Callable[..., None], self: Any, hf_config: Any, *args: Any, **kwargs: Any) -> None:
    """Read the rotary embedding's base for mbridge from the attribute that transformers 5 uses.

    mbridge reads `config.rope_theta`, which transformers 5 moved to `config.rope_parameters`; transformers 4 has no
    `rope_parameters`.
    """
    parameters = getattr(hf_config, "rope_parameters", None)
    if parameters and not hasattr(hf_config, "rope_theta"):
        hf_config.rope_theta = parameters["rope_theta"]
    original(self, hf_config, *args, **kwargs)


# Some Megatron modules allocate on "cuda" by name. They call `torch.zeros(..., device="cuda")` and similar functions
# inside functions that cannot be wrapped without copying them. Therefore, these modules, but no other code in the
# process, use PyTorch through `CpuTorch`, for which "cuda" means the CPU.
MODULES = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
"""Modules that can run on gloo but hard-code the device."""

FACTORIES = ("empty", "ones", "tensor", "zeros")
"""PyTorch functions that these modules call with a device."""


class CpuTorch(ModuleType):
    """PyTorch, except that the functions in `FACTORIES` allocate on the CPU when the device is "cuda"."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return allocate


def _hand_over(contract: Contract, module_name: str) -> None:
    contract.check()
    module = sys.modules[module_name]
    if not torch.cuda.is_available() and not isinstance(module.torch, CpuTorch):
        module.torch = CpuTorch()  # type: ignore[attr-defined]
        logger.info("patch %s in force in %s", contract.name, module_name)


class _NamesDevice(ReleasePatch):
    def install(self) -> None:
        """Patch each module now or when it is imported. Idempotent."""
        for (contract, hand_over), module in zip(self.wrappers, MODULES, strict=True):
            if not is_awaited(module):
                after_import(module, partial(hand_over, contract, module))

    def waiting(self) -> bool:
        return any(map(is_awaited, MODULES))

    def in_force(self) -> bool:
        """Return True if at least one target module has been imported and all imported ones use `CpuTorch`."""
        imported = [sys.modules[name] for name in MODULES if name in sys.modules]
        return bool(imported) and all(isinstance(module.torch, CpuTorch) for module in imported)


PATCHES = {
    "megatron_cuda": _megatron(
        "megatron_cuda",
        (
            "megatron.core.parallel_state:initialize_model_parallel",
            "(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, "
            "pipeline_model_parallel_comm_backend=None, use_sharp=False, context_parallel_size=1, "
            "hierarchical_context_parallel_sizes=None, hybrid_context_parallel=False, expert_model_parallel_size=1, "
            "num_distributed_optimizer_instances=1, expert_tensor_parallel_size=None, "
            "nccl_communicator_config_path=None, distributed_timeout_minutes=30, order='tp-cp-ep-dp-pp', "
            "get_embedding_ranks=None, get_position_embedding_ranks=None, create_gloo_process_groups=True, "
            "high_priority_stream_groups=None, sharp_enabled_group=None, create_all_gather_group=False)",
            _initialize,
        ),
    ),
    "megatron_rng": _megatron(
        "megatron_rng",
        (f"{_RANDOM}:_get_cuda_rng_state", "(device='cuda', clone=False, graph_safe=False)", _get_rng_state),
        (f"{_RANDOM}:_set_cuda_rng_state", "(new_state, device=-1, graph_safe=False)", _set_rng_state),
    ),
    "megatron_optimizer": _megatron(
        "megatron_optimizer",
        (
            f"{_OPTIMIZER}:get_megatron_optimizer",
            "(config, model_chunks, config_overrides=None, use_gloo_process_groups=True, pg_collection=None, "
            "dump_param_to_param_group_map=None)",
            _while_named,
        ),
        (  # the name by which the optimizers call it
            f"{_OPTIMIZER}.optimizer:clip_grad_by_total_norm_fp32",
            "(parameters, max_norm, total_norm, use_decoupled_grad=False)",
            _while_named,
        ),
    ),
    "megatron_attention": _megatron(
        "megatron_attention",
        (
            "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            "(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, "
            "packed_seq_params=None)",
            _attend,
        ),
    ),
    "megatron_bridge": _mbridge(
        "megatron_bridge",
        (  # the name by which mbridge calls it
            "mbridge.core.llm_bridge:get_gpt_decoder_block_spec",
            "(config, use_transformer_engine, normalization=None, qk_l2_norm=False, vp_stage=None, pp_rank=None)",
            _local_layers,
        ),
        (
            "mbridge.core.llm_bridge:LLMBridge._weight_name_mapping_mcore_to_hf",
            "(self, mcore_weights_name)",
            _fused_name,
        ),
    ),
    "megatron_rope": _mbridge(
        "megatron_rope",
        (
            "mbridge.core.bridge:Bridge.__init__",
            "(self, hf_config, dtype=torch.bfloat16, parallel_states=None, make_vocab_size_divisible_by=None)",
            _init_bridge,
        ),
    ),
    "megatron_device": _NamesDevice(
        tuple(
            (Contract("megatron_device", f"{module}:torch", None, "megatron-core", "==0.16.*"), _hand_over)
            for module in MODULES
        )
    ),
}
