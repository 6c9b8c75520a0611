"""Computes, in the trainer's workers, checksums of the trained weights, rounded like the rollout engine's.

It reads ``actor.engine.module`` of verl's ``ActorRolloutRefWorker`` and ``actor_module_fsdp`` of the legacy worker.
If the sent tensors are not the parameters (FSDP1, other engines, merged LoRA), it patches the engine's
``get_per_tensor_param`` or ``rollout.update_weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .checksums import compute_checksums, plain_name

SAMPLE = 256
"""Number of elements per parameter and rank whose change is tracked."""
_SENT = "_offpolicy_sent"
AS_SENT = "as sent"
"""Used instead of a dtype if the engine keeps a tensor as sent, for example LoRA's tensors."""


def weigh_own(worker: Any, default: str, others: Mapping[str, str]) -> dict[str, Any]:
    """Compute the checksums of this rank's weights.

    Args:
        worker: verl's actor worker.
        default: torch's name of the dtype in which the engine holds most tensors.
        others: plain name -> dtype of the other tensors, or ``AS_SENT``.

    Returns:
        ``weights``: plain name -> count, sum, sum of squares and whether it is trained; ``sent``: True if these are
        checksums of the tensors as sent; ``update``: see ``UpdateSample.step``.
    """
    if _SENT in vars(worker):
        return {"weights": dict(vars(worker)[_SENT]), "sent": True, "update": []}
    module = _find_module(worker)
    own = [(plain_name(name), parameter) for name, parameter in module.named_parameters(remove_duplicate=False)]
    dtypes = {
        name: parameter.dtype if others.get(name) == AS_SENT else getattr(torch, others.get(name, default))
        for name, parameter in own
    }
    shards = [
        (name, shard, parameter.requires_grad)
        for name, parameter in own
        if (shard := _find_shard(parameter)) is not None
    ]
    # Offloaded parameters are on the host, where their checksums would take seconds.
    device = "cuda" if torch.cuda.is_available() else None
    weighed = compute_checksums(((name, shard, dtypes[name]) for name, shard, _ in shards), device)
    trained = {name: trains for name, _, trains in shards}
    sample = vars(worker).setdefault("_offpolicy_sample", UpdateSample())
    update = sample.step((name, shard, dtypes[name]) for name, shard, trains in shards if trains)
    return {
        "weights": {name: [*each, int(trained[name])] for name, each in weighed.items()},
        "sent": False,
        "update": update,
    }


def _find_module(worker: Any) -> Any:
    """Return the trained model: a module, or Megatron's list of modules."""
    engine = getattr(getattr(worker, "actor", None), "engine", None)
    return getattr(worker, "actor_module_fsdp", None) if engine is None else engine.module


def _find_shard(parameter: Tensor) -> Tensor | None:
    """Return this rank's part of a parameter; None if another rank counts the same elements."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(parameter, DTensor):
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        return parameter.detach() if first else None
    place = parameter.device_mesh.get_coordinate()
    if place is None:
        return None
    copies = [at for at, kind in zip(place, parameter.placements, strict=True) if isinstance(kind, Replicate)]
    if any(copies):
        return None
    shard: Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    return shard


class UpdateSample:
    """A few elements of each parameter, whose change between synchronisations is tracked."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def step(self, shards: Any) -> list[float]:
        """Return [sum of u r, sum of u^2, changed in u, changed in r, count] since the previous synchronisation.

        u is the change of an element, and r its change after the engine's rounding. The list is empty at the first
        call.
        """
        sums = torch.zeros(5, dtype=torch.float64)
        before, self._before = self._before, {}
        for name, shard, dtype in shards:
            flat = shard.reshape(-1)
            taken = flat[:: max(flat.numel() // SAMPLE, 1)][:SAMPLE].detach().to("cpu", copy=True)
            now = taken.double(), taken.to(dtype).double()
            self._before[name] = now
            if name in before:
                own, rounded = (after - earlier for after, earlier in zip(now, before[name], strict=True))
                sums += torch.stack(
                    [own @ rounded, own @ own, (own != 0).sum(), (rounded != 0).sum(), torch.tensor(own.numel())]
                ).double()
        return sums.tolist() if before else []


def watch_sent(worker: Any, dtype: str) -> None:
    """Make a worker record checksums of the tensors that it sends, if these tensors are not the worker's parameters.

    Args:
        worker: verl's actor worker; for the legacy workers of 0.7.1 the rollout is patched.
        dtype: torch's name of the rollout engine's dtype.
    """
    if not _sends_other_tensors(worker):
        return
    vars(worker)[_SENT] = {}
    engine = getattr(getattr(worker, "actor", None), "engine", None)
    if engine is not None:
        export = engine.get_per_tensor_param

        def get_per_tensor_param(*args: Any, **kwargs: Any) -> Any:
            tensors, config = export(*args, **kwargs)
            return _note_sent(worker, tensors, dtype), config

        engine.get_per_tensor_param = get_per_tensor_param
        return
    send = worker.rollout.update_weights

    async def update_weights(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return await send(_note_sent(worker, tensors, dtype), *args, **kwargs)

    worker.rollout.update_weights = update_weights


def _note_sent(worker: Any, tensors: Any, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the sent tensors, and record their checksums, rounded like the rollout engine's, on rank 0."""
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    noted: dict[str, list[int]] = vars(worker)[_SENT]
    for name, tensor in tensors:
        if first:
            rounded = None if "lora_" in name else getattr(torch, dtype)
            (each,) = compute_checksums([(name, tensor, rounded)]).values()
            noted[plain_name(name)] = [*each, 1]
        yield name, tensor


def _sends_other_tensors(worker: Any) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = _find_module(worker)
    if not isinstance(module, torch.nn.Module):
        return True
    model = getattr(module, "_fsdp_wrapped_module", module)
    engine = getattr(getattr(worker, "actor", None), "engine", None)
    # For other engines, and for models whose names verl converts, the sent tensors are not named like the parameters.
    renamed = bool(getattr(model, "_checkpoint_conversion_mapping", None))
    if renamed or not (engine is None or type(engine).__name__.startswith("FSDP")):
        return True
    if any(isinstance(each, FullyShardedDataParallel) for each in module.modules()):
        return True
    peft = hasattr(model, "peft_config")
    lora: Any = getattr(getattr(engine, "model_config", None), "lora", None) or {}
    return peft and bool(lora.get("merge", False))


def add_method(worker: type) -> None:
    """Add the method ``weigh_offpolicy`` to verl's actor workers, in every process of a run."""
    from verl.single_controller.base.decorator import Dispatch, register

    def weigh_offpolicy(self: Any, default: str, others: Mapping[str, str]) -> dict[str, Any]:
        return weigh_own(self, default, others)

    method: Callable[..., Any] = register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)(weigh_offpolicy)
    worker.weigh_offpolicy = method  # type: ignore[attr-defined]
