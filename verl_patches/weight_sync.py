"""Contracts on how verl sends weights to its rollout servers, and a wrapper that reports each synchronisation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from .contract import Contract, wrap
from .engine_loss import Seams

_VLLM = "verl.workers.rollout.vllm_rollout"
_UPDATE = Seams("verl.checkpoint_engine.base:CheckpointEngineManager")(
    "update_weights", "(self, global_steps=None)", name="update_weights of the manager", names=("update_weights",)
)
SEAMS = (_UPDATE,)
"""Functions on which every run relies."""


def build_vllm_seams() -> tuple[Contract, Contract, Contract]:
    """Build the contracts on verl's extension of vLLM's workers, and on its server; only importable there."""
    return (
        Seams(f"{_VLLM}.utils:vLLMColocateWorkerExtension")(
            "_update_weights", "(self, weights, peft_config, base_sync_done)", names=("load_weights", "add_lora")
        ),
        Seams(f"{_VLLM}.utils:vLLMColocateWorkerExtension")(
            "update_weights_from_ipc",
            "(self, peft_config=None, base_sync_done=False, use_shm=False)",
            names=("receive_weights", "_update_weights"),
        ),
        Seams(f"{_VLLM}.vllm_async_server:vLLMHttpServer")(
            "collective_rpc", "(self, method, timeout=None, args=(), kwargs=None)", names=("engine", "collective_rpc")
        ),
    )


_listeners: list[Callable[[Any], None]] = []


def listen(heard: Callable[[Any], None]) -> None:
    """Call ``heard(manager)`` after each synchronisation of this process; the function given last is used."""
    _listeners[:] = [heard]
    wrap(_UPDATE, _tell)


def _tell(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    # verl's auto_await returns a coroutine if its caller is a coroutine, and otherwise runs the coroutine.
    if sys._getframe(2).f_code.co_flags & inspect.CO_COROUTINE:
        return _tell_awaited(original, manager, *args, **kwargs)
    result = original(manager, *args, **kwargs)
    for heard in _listeners:
        heard(manager)
    return result


async def _tell_awaited(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    result = await original(manager, *args, **kwargs)
    for heard in _listeners:
        heard(manager)
    return result
