"""Let Megatron's optimizers accept parameters on the CPU.

They distinguish parameters by `param.type()`, accept only "torch.cuda.FloatTensor" and its 16-bit variants, and raise
at "torch.FloatTensor". During that check, `Tensor.type()` returns the name of CUDA's type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..contract import Contract
from .release_patch import ReleasePatch, Wrapping

_MODULE = "megatron.core.optimizer"


def _contract(name: str, target: str, signature: str) -> Contract:
    return Contract(name=name, target=target, signature=signature, distribution="megatron-core", releases="==0.16.*")


@contextmanager
def _named_as_cuda() -> Iterator[None]:
    """Let `Tensor.type()` return "torch.cuda.FloatTensor" for "torch.FloatTensor" inside the block."""

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
    with _named_as_cuda():
        return original(*args, **kwargs)


PATCH = ReleasePatch(
    (
        Wrapping(
            _while_named,
            _contract(
                "megatron_optimizer",
                f"{_MODULE}:get_megatron_optimizer",
                "(config, model_chunks, config_overrides=None, use_gloo_process_groups=True, pg_collection=None, "
                "dump_param_to_param_group_map=None)",
            ),
        ),
        Wrapping(
            _while_named,
            _contract(
                "megatron_optimizer.clip_grad",
                # The name by which the optimizers call it.
                f"{_MODULE}.optimizer:clip_grad_by_total_norm_fp32",
                "(parameters, max_norm, total_norm, use_decoupled_grad=False)",
            ),
        ),
    ),
    after=_MODULE,
)
