"""Let Megatron's own attention accept the padding mask that verl creates for Transformer Engine's.

Without Transformer Engine the layers are Megatron's local ones. verl's padded batches have a mask of shape (batch,
sequence), which Transformer Engine ignores for causal attention and the local attention would broadcast over the
scores. In rows that are padded on the right, no token attends to padding, so the causal mask alone is exact; the local
attention creates it if it gets no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..contract import Contract
from .release_patch import ReleasePatch, Wrapping

_MODULE = "megatron.core.transformer.dot_product_attention"
CONTRACT = Contract(
    name="megatron_attention",
    target=f"{_MODULE}:DotProductAttention.forward",
    signature=(
        "(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None)"
    ),
    distribution="megatron-core",
    releases="==0.16.*",
)


def _forward(
    original: Callable[..., torch.Tensor],
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if attention_mask is not None and attention_mask.dim() == 2:
        if bool((~attention_mask[:, :-1].bool() & attention_mask[:, 1:].bool()).any()):
            raise ValueError(
                "the padding mask that reached Megatron's attention has padding before a token. Without Transformer "
                "Engine, sequences must be padded on the right only."
            )
        attention_mask = None
    return original(self, query, key, value, attention_mask, *args, **kwargs)


PATCH = ReleasePatch((Wrapping(_forward, CONTRACT),), after=_MODULE)
