"""Patches of verl, most of them only for older releases."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ..contract import Contract, PatchError, logger, resolve
from ..deferred import Addition, ReleasePatch
from ..releases import Release, specifiers
from . import Row, build, installed_has

_FSDP, _VLLM = "verl.utils.fsdp_utils", "verl.workers.rollout.vllm_rollout"
_ENGINE, _VARIABLE = "verl.workers.engine", "VERL_ENGINE_DEVICE"
_TRANSFORMERS = "verl.workers.engine.fsdp.transformer_impl"


def _build(name: str, holds: Callable[[Release], bool], *rows: Row, at_once: bool = False) -> ReleasePatch:
    cause = partial(installed_has, holds)
    return build(name, *rows, of=("verl", specifiers(holds)), cause=cause, at_once=at_once)


def _is_before_platforms(release: Release) -> bool:
    return not release.platforms


def _is_legacy(release: Release) -> bool:
    return release.legacy_actors


# A `cpu` platform for verl's platform registry. It uses gloo and has no streams. verl 0.9 ships only cuda, rocm and
# npu, but allows external modules to register more, so this platform does not change verl. Its Ray resource is "GPU",
# because verl's placement groups request this resource; a run on the CPU declares as many GPUs as it has workers
# (`ray_kwargs.ray_init.num_gpus`). Earlier releases have no platforms.
_PLATFORMS = "verl.plugin.platform.platform_manager:PlatformRegistry"
_PLATFORM = Contract(
    "platform", f"{_PLATFORMS}.register", "(platform)", "verl", specifiers(lambda release: release.platforms)
)


@functools.cache
def _build_platform() -> Any:
    from verl.plugin.platform.platform_base import PlatformBase  # exists only in verl 0.9 and later

    class PlatformCPU(PlatformBase):
        """CPU implementation of verl's device platform."""

        device_name = property(lambda self: "cpu")
        vendor_name = property(lambda self: "cpu")
        device_module: ModuleType = property(lambda self: torch.cpu)  # type: ignore[assignment]

        def is_available(self) -> bool:
            return True

        def current_device(self) -> torch.device:
            # verl passes this value to tensor.to(), where an index would select an accelerator.
            return torch.device("cpu")

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            # Without CUDA IPC, verl sends weights to the rollout through POSIX shared memory.
            return False

        def cudart(self) -> Any:
            return None

    return PlatformCPU


def _register_platform() -> None:
    register, platform = _PLATFORM.check(), _build_platform()
    if missing := sorted(getattr(platform, "__abstractmethods__", ())):
        raise PatchError(_PLATFORM.moved(f"a PlatformBase that also requires {', '.join(missing)}"))
    register(platform="cpu")(platform)
    logger.info("patch %s in force: verl platform 'cpu'", _PLATFORM.name)


def _has_platform() -> bool:
    registry = resolve(_PLATFORMS)
    return registry is not None and registry.get("cpu") is _build_platform()


# Names for the CPU where verl expects an accelerator. Before 0.9, verl has no platforms. Without an accelerator, its
# device is `cpu`, and two functions return wrong names: the resource "NPU", which no placement group requests, and the
# backend "nccl".
class _DevicePatch(ReleasePatch):
    def install(self) -> None:
        """Wrap the two functions.

        Raises:
            PatchError: a target has changed, or there is an accelerator, which these releases always use.
        """
        if self.cause() and torch.cuda.is_available():
            raise PatchError(
                "VERL_PLATFORM=cpu on a machine with a GPU: verl before 0.9 uses any GPU that it finds. Fix: unset "
                "VERL_PLATFORM and VERL_USE_EXTERNAL_MODULES to train on the GPU, or use verl 0.9.1."
            )
        super().install()


_device = _build(
    "device",
    _is_before_platforms,
    ("verl.utils.device:get_resource_name", "()", lambda original: "GPU"),
    ("verl.utils.device:get_nccl_backend", "()", lambda original: "gloo"),
    at_once=True,
)

# Let VERL_ENGINE_DEVICE choose the training engine in releases that do not read this variable. verl registers engines
# by device name, but none for `cpu`; the engines for `cuda` also run on the CPU. Therefore, every engine of the named
# device is registered for `cpu` as well.
REGISTER = Contract(
    "engine_device",
    f"{_ENGINE}.base:EngineRegistry.register",
    "(model_type, backend, device='cuda')",
    "verl",
    specifiers(_is_before_platforms),
)


def _registered() -> dict[str, dict[str, dict[str, Any]]]:
    """Return verl's registry: model type -> backend -> device -> engine class."""
    registry = importlib.import_module(f"{_ENGINE}.base").EngineRegistry
    # Without this attribute, no engine is found; ``_register_for_cpu`` reports this.
    engines: dict[str, dict[str, dict[str, Any]]] = getattr(registry, "_engines", {})
    return engines


def _register_for_cpu() -> None:
    register, device, count = REGISTER.check(), os.environ.get(_VARIABLE), 0
    for model_type, backends in _registered().items():
        for backend, engines in backends.items():
            if engine := engines.get(device or ""):
                register(model_type, backend, device="cpu")(engine)
                count += 1
    if not count:
        raise PatchError(REGISTER.moved(f"no engine for {_VARIABLE}={device!r}", "engines to be registered by device"))
    logger.info("patch %s is active: %d engines registered for %s also run on the CPU", REGISTER.name, count, device)


def _serve_cpu() -> bool:
    return any("cpu" in engines for backends in _registered().values() for engines in backends.values())


def _apply_fsdp2(original: Callable[..., None], model: Any, fsdp_kwargs: Any, config: Any) -> None:
    """Pass the names of a model's layers to FSDP2 as the list that verl 0.7.1 expects.

    vLLM's CPU build needs transformers 5, which returns these names as a set, but verl 0.7.1 takes the first name by
    index. Later releases of verl convert the set to a list.
    """
    # A set has no defined order, but verl takes the first name, which must be the same on every rank.
    if isinstance(names := getattr(model, "_no_split_modules", None), set | frozenset):
        model._no_split_modules = sorted(names)
    original(model, fsdp_kwargs, config)


def _get_attention_functions(original: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Let verl remove padding without flash-attn, which needs CUDA.

    verl imports four functions that gather and scatter rows from flash-attn. For NPUs, verl also ships these functions
    in plain PyTorch. If flash-attn is missing, this patch uses the versions for NPUs, as verl 0.9.1 and later do.
    """
    try:
        return original()
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "flash_attn":
            raise
        plain = importlib.import_module("verl.utils.npu_flash_attn_utils")
        return tuple(getattr(plain, name) for name in ("index_first_axis", "pad_input", "rearrange", "unpad_input"))


# Let `fsdp_config.mixed_precision` determine the precision of verl 0.7.1's engine on the CPU. That release runs every
# forward pass under autocast to bfloat16, regardless of the configuration. On a GPU, autocast still computes
# log_softmax in float32. On the CPU, log_softmax stays in bfloat16, and its rounding error of up to 0.03 nats per token
# looks like a mismatch between trainer and rollout engine. Later releases skip autocast if `param_dtype` is fp32, and
# so does this patch.
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
    unwanted = device_type == "cpu" and _in_float32.get()
    original(self, device_type, dtype=dtype, enabled=enabled and not unwanted, **kwargs)


_AUTOCAST = Contract(
    "autocast",
    "torch:autocast.__init__",
    "(self, device_type, dtype=None, enabled=True, cache_enabled=None)",
    "torch",
    ">=2.13,<2.14",
)
_forward = _build(
    "autocast",
    _is_legacy,
    (
        f"{_TRANSFORMERS}:FSDPEngineWithLMHead.forward_step",
        "(self, micro_batch, loss_function, forward_only)",
        _forward_step,
    ),
)


def slot_name(environment: Mapping[str, str]) -> str:
    """Build a socket name from the slot of Ray's resource "GPU" in a process's environment.

    verl sends weights to vLLM through a socket with this name. In 0.7.1, the trainer and vLLM's worker agree on a name
    because both read the UUID of their common GPU. On the CPU, both processes know the worker's slot and the Ray node
    on which they run. Together, slot and node distinguish replicas and simultaneous runs. In 0.8.0, the name consists
    of replica and rank, but verl still reads the UUID, which does not exist in vLLM's CPU build.

    Raises:
        PatchError: there is no slot, or there are several, so vLLM's workers cannot be distinguished.
    """
    slots = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not slots or "," in slots:
        raise PatchError(
            f"patch 'weight_socket': CUDA_VISIBLE_DEVICES={slots!r}, but exactly one slot of Ray's resource GPU is "
            "needed. Fix: set actor_rollout_ref.rollout.tensor_model_parallel_size=1, which verl before 0.9 needs on "
            "the CPU."
        )
    return f"CPU-{environment.get('RAY_RAYLET_PID', '0')}-{slots}"


class Buffer(torch.Tensor):
    """A tensor whose `to` always copies, as it does from the host to an accelerator; its views behave the same."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).to(*args, **kwargs).clone()


def _rebuild_shared_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Copy each synchronised weight into separate memory before vLLM loads it.

    verl 0.7.1 passes weights to vLLM's process in shared memory, one bucket at a time. The receiver moves each tensor
    to its device, reports that the bucket is free, and then loads the weights. On the CPU, moving a tensor copies
    nothing. The sender may therefore overwrite weights that are still being loaded, and the segment cannot be closed
    while the weights are in use. In later releases, the receiver reports after loading.
    """
    tensor, segment = original(*args, **kwargs)
    return tensor.as_subclass(Buffer), segment


def _copied(original: Callable[[Any], tuple[dict[str, Any], Any]], model: Any) -> tuple[dict[str, Any], Any]:
    """Copy FSDP2 weights for a snapshot if these weights are on the CPU.

    verl's asynchronous trainer computes pi_old with the weights of the last synchronisation, which it keeps by calling
    `param.detach().cpu()`. On the CPU, this returns the live parameter itself, so pi_old silently becomes the current
    policy.
    """
    shards, layout = original(model)
    return {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}, layout


PATCHES = {
    "platform": Addition(
        ((_PLATFORM, _register_platform),),
        cause=partial(installed_has, lambda release: release.platforms),
        added=_has_platform,
    ),
    "device": _DevicePatch(_device.wrappers, None, _device.cause),
    "engine_device": Addition(
        ((REGISTER, _register_for_cpu),), _ENGINE, partial(installed_has, _is_before_platforms), _serve_cpu
    ),
    "layer_names": _build(
        "layer_names", _is_legacy, (f"{_FSDP}:apply_fsdp2", "(model, fsdp_kwargs, config)", _apply_fsdp2)
    ),
    "padding": _build(
        "padding",
        lambda release: not release.unpads_alone,
        ("verl.utils.attention_utils:_get_attention_functions", "()", _get_attention_functions),
    ),
    "autocast": ReleasePatch((*_forward.wrappers, (_AUTOCAST, _autocast)), _TRANSFORMERS, _forward.cause),
    "weight_socket": _build(
        "weight_socket",
        _is_before_platforms,
        (f"{_VLLM}.utils:get_device_uuid", "(device_id)", lambda original, device_id: slot_name(os.environ)),
    ),
    "weight_buffer": _build(
        "weight_buffer",
        _is_legacy,
        (
            f"{_VLLM}.bucketed_weight_transfer:rebuild_shared_memory",
            "(name, size, dtype=torch.uint8)",
            _rebuild_shared_memory,
        ),
    ),
    "async_snapshot": _build(
        "async_snapshot", lambda release: True, (f"{_FSDP}:fsdp2_sharded_save_to_cpu", "(model)", _copied)
    ),
}
