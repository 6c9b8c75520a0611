"""Mixtures of experts with random weights, one per family of transformers whose routes can be replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, EXPERTS, TOP_K, WORDS = 3, 8, 2, 64
ROWS, WIDTH = 2, 12
TOKENS = ROWS * WIDTH

_BASE: dict[str, Any] = dict(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="eager",
)
_SIZES = dict(num_experts=EXPERTS, num_experts_per_tok=TOP_K)
_LOCAL = dict(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
_FINE = dict(**_SIZES, moe_intermediate_size=16)
_SHARED = dict(**_FINE, shared_expert_intermediate_size=16, head_dim=8, layer_types=["full_attention"] * LAYERS)
_GROUPED = dict(
    n_routed_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    moe_intermediate_size=16,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
_LATENT = dict(
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    num_key_value_heads=4,
    head_dim=4,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": dict(**_FINE, head_dim=8, norm_topk_prob=True),
    "GptOss": dict(**_LOCAL, head_dim=8),
    "DeepseekV3": dict(**_GROUPED, **_LATENT),
    "Qwen2Moe": dict(**_FINE, shared_expert_intermediate_size=16),
    "Qwen3Next": _SHARED,
    "Qwen3_5Moe": _SHARED,
    "Mixtral": _LOCAL,
    "Olmoe": _SIZES,
    "FlexOlmo": _SIZES,
    "Glm4Moe": dict(**_GROUPED, head_dim=8),
    "Glm4MoeLite": dict(**_GROUPED, **_LATENT),
    "Dots1": dict(**_GROUPED, head_dim=8),
    "MiniMaxM2": dict(**_LOCAL, head_dim=8),
    "Ernie4_5_Moe": dict(moe_num_experts=EXPERTS, moe_k=TOP_K, moe_intermediate_size=16, moe_layer_start_index=0),
    "GraniteMoe": _LOCAL,
    "HunYuanMoEV1": dict(num_experts=EXPERTS, moe_topk=TOP_K, head_dim=8),
    "Llama4": dict(
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        head_dim=8,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=32,
    ),
    "Lfm2Moe": dict(**_FINE, num_dense_layers=1, layer_types=["full_attention"] * LAYERS),
    "Jamba": dict(
        **_SIZES,
        expert_layer_period=1,
        expert_layer_offset=0,
        attn_layer_period=1,
        attn_layer_offset=0,
        use_mamba_kernels=False,
    ),
}
"""Class of transformers, without its suffix -> settings of its config."""

KINDS = ("Qwen3Moe", "GptOss", "DeepseekV3")
"""One family per kind of gate: softmax before the choice; softmax after it; and sigmoid, bias, groups and a dense first
layer.
"""

_TEXT_CONFIGS = {"Llama4": "Llama4TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}


def build_mixture(family: str, seed: int = 0, **settings: Any) -> Any:
    """A model in training mode, with weights and biases that are large enough for routes to matter."""
    import transformers

    config = getattr(transformers, _TEXT_CONFIGS.get(family, f"{family}Config"))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        given = {**_BASE, **FAMILIES.get(family, _LOCAL), **settings}
        model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config(**given)).float()
        for weight in model.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, 0, 0.3)
        for name, bias in model.named_buffers():
            if "bias" in name:
                nn.init.normal_(bias, 0, 0.1)
    return model.train()


@functools.cache
def draw_tokens(seed: int = 0) -> Tensor:
    """Draw (ROWS, WIDTH) tokens from a vocabulary of WORDS."""
    return torch.randint(3, WORDS, (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))


def draw_routes(top_k: int = TOP_K, dense: int = 0, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    """Draw routes, (tokens, LAYERS, top_k) int64: distinct random experts, and zeros in the first layers if these are
    dense.
    """
    scores = torch.rand(tokens, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    routes = scores.argsort(-1)[..., :top_k]
    routes[:, :dense] = 0
    return routes


def set_checkpointing(model: Any, on: bool) -> None:
    """Set activation checkpointing as verl does."""
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def compute_gradients(
    model: Any, before_backward: Callable[[], None] = lambda: None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits, and the gradient of each parameter for a loss that reads all logits."""
    tokens = draw_tokens()
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = logits.log_softmax(-1).gather(-1, tokens.roll(-1, 1)[..., None]).sum()
    before_backward()
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return logits.detach(), gradients
