"""Let mbridge build its models from Megatron's local layers if Transformer Engine is not installed.

mbridge requests Transformer Engine's layers and uses their weight names: there the norm before a linear layer is part
of that layer, while the local layers have a separate one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Contract
from .release_patch import ReleasePatch, Wrapping

_MODULE = "mbridge.core.llm_bridge"

FUSED_NAMES = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
"""Name of a norm's weight in the local layers -> in Transformer Engine's."""


def _contract(name: str, target: str, signature: str) -> Contract:
    return Contract(name=name, target=target, signature=signature, distribution="mbridge", releases="==0.15.*")


def _local_layers(original: Callable[..., Any], config: Any, use_transformer_engine: bool, **kwargs: Any) -> Any:
    return original(config, use_transformer_engine=False, **kwargs)


def _fused_name(original: Callable[..., list[str]], self: Any, mcore_weights_name: str) -> list[str]:
    for local, fused in FUSED_NAMES.items():
        mcore_weights_name = mcore_weights_name.replace(local, fused)
    return original(self, mcore_weights_name)


PATCH = ReleasePatch(
    (
        Wrapping(
            _local_layers,
            _contract(
                "megatron_bridge",
                # The name by which mbridge calls it.
                f"{_MODULE}:get_gpt_decoder_block_spec",
                "(config, use_transformer_engine, normalization=None, qk_l2_norm=False, vp_stage=None, pp_rank=None)",
            ),
        ),
        Wrapping(
            _fused_name,
            _contract(
                "megatron_bridge.names",
                f"{_MODULE}:LLMBridge._weight_name_mapping_mcore_to_hf",
                "(self, mcore_weights_name)",
            ),
        ),
    ),
    after=_MODULE,
)
