"""Keep Megatron's CUDA random states in the CPU's generator.

Megatron forks a state by two functions that access CUDA's generators. verl seeds them, and attention forks them at
every layer, even without dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..contract import Contract
from .release_patch import ReleasePatch, Wrapping

_MODULE = "megatron.core.tensor_parallel.random"


def _contract(name: str, signature: str) -> Contract:
    return Contract(
        name=f"megatron_rng.{name}",
        target=f"{_MODULE}:{name}",
        signature=signature,
        distribution="megatron-core",
        releases="==0.16.*",
    )


def _get(original: Callable[..., Any], *_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set(original: Callable[..., Any], new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


PATCH = ReleasePatch(
    (
        Wrapping(_get, _contract("_get_cuda_rng_state", "(device='cuda', clone=False, graph_safe=False)")),
        Wrapping(_set, _contract("_set_cuda_rng_state", "(new_state, device=-1, graph_safe=False)")),
    ),
    after=_MODULE,
)
