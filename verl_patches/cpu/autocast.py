"""Let `fsdp_config.mixed_precision` decide the precision of verl 0.7.1's engine on the CPU.

That release runs every forward pass under autocast to bfloat16, whatever the configuration. On a GPU, autocast still
computes log_softmax in float32; on the CPU it stays in bfloat16, whose rounding of up to 0.03 nats per token looks like
mismatch of the two engines. Later releases skip autocast if `param_dtype` is fp32, and so does this patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..contract import Contract
from ..releases import specifiers
from .release_patch import ReleasePatch, Wrapping

_MODULE = "verl.workers.engine.fsdp.transformer_impl"
_in_float32 = ContextVar("_in_float32", default=False)


def _is_float32(mixed_precision: Mapping[str, Any] | None) -> bool:
    """Return True if `fsdp_config.mixed_precision` selects float32 parameters; null means bfloat16."""
    return str((mixed_precision or {}).get("param_dtype", "bf16")) in {"fp32", "float32", "torch.float32"}


@contextmanager
def _float32(asked_for: bool) -> Iterator[None]:
    token = _in_float32.set(asked_for)
    try:
        yield
    finally:
        _in_float32.reset(token)


def _forward_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with _float32(_is_float32(self.engine_config.mixed_precision)):
        return original(self, *args, **kwargs)


def _autocast(
    original: Callable[..., None], self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any
) -> None:
    original(
        self, device_type, dtype=dtype, enabled=enabled and not (device_type == "cpu" and _in_float32.get()), **kwargs
    )


PATCH = ReleasePatch(
    (
        Wrapping(
            _forward_step,
            Contract(
                name="autocast",
                target=f"{_MODULE}:FSDPEngineWithLMHead.forward_step",
                signature="(self, micro_batch, loss_function, forward_only)",
                distribution="verl",
                releases=specifiers(lambda release: release.legacy_actors),
            ),
        ),
        Wrapping(
            _autocast,
            Contract(
                name="autocast",
                target="torch:autocast.__init__",
                signature="(self, device_type, dtype=None, enabled=True, cache_enabled=None)",
                distribution="torch",
                releases=">=2.13,<2.14",
            ),
        ),
    ),
    cause=lambda release: release.legacy_actors,
    after=_MODULE,
)
