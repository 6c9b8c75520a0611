"""Weight checksums that can be added over shards, ranks and fused parameters; the keys of ``offpolicy.delivery``.

This module reads ``actor.engine.module`` of verl's ``ActorRolloutRefWorker`` and ``actor_module_fsdp`` of the legacy
worker. If the worker does not send its parameters themselves (FSDP1, other engines, merged LoRA), this module patches
the engine's ``get_per_tensor_param`` or ``rollout.update_weights``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ..batch.declared_keys import Section, count, read_shipped_defaults

SECTION = "offpolicy.delivery"
LEAST_SEEN = 0.5
"""Updates count as lost to rounding if less than this share of them survives rounding to the engine's dtype."""
FIX_ROUNDED = "actor_rollout_ref.rollout.dtype=float32, or a larger actor_rollout_ref.actor.optim.lr"


@dataclass(frozen=True)
class DeliverySettings:
    """How often the rollout engine's weights are compared with the trainer's.

    Attributes:
        sums: number of synchronisations from one comparison of checksums to the next; None for never.
        probe: number of synchronisations from one probe to the next; None for never.
    """

    sums: int | None
    probe: int | None

    @classmethod
    def from_config(cls, config: DictConfig) -> DeliverySettings:
        """Read the settings of a checked configuration."""
        return cls(**{**read_shipped_defaults("delivery"), **(OmegaConf.select(config, SECTION) or {})})


_EVERY = "a number of synchronisations, 1 or more, or null for never"
KEYS = Section(
    SECTION,
    read_shipped_defaults("delivery"),
    {"sums": count(_EVERY, null=True), "probe": count(_EVERY, null=True)},
)


find_problems = KEYS.find_problems
"""Find invalid values of ``offpolicy.delivery``."""


CHUNK = 1 << 22
"""Number of elements that are converted to a wider dtype at a time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRAPPERS = re.compile(
    r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|base_layer|modules_to_save|default)(?=\.|$)"
)


class Checksum(NamedTuple):
    """Sums over the bit patterns b of a tensor's elements, which are exact in any order.

    Attributes:
        size: number of elements.
        total: sum of b, modulo 2^64.
        squares: sum of b^2, modulo 2^64.
    """

    size: int
    total: int
    squares: int


def add_checksums(parts: Iterable[Checksum]) -> Checksum:
    """Add up the checksums of disjoint parts of a tensor, or of several tensors."""
    size, *sums = (sum(column) for column in zip(Checksum(0, 0, 0), *parts, strict=True))
    total, squares = ((value + (1 << 63)) % (1 << 64) - (1 << 63) for value in sums)  # as int64 wraps
    return Checksum(size, total, squares)


def sum_bits(tensor: Tensor, dtype: torch.dtype | None = None, device: str | None = None) -> Tensor:
    """Sum the bit patterns of ``tensor`` after rounding it to ``dtype``; chunks are copied to ``device`` first.

    Returns:
        (2,) int64 on ``device`` (default: the tensor's device): sums of the patterns and of their squares, modulo 2^64.
    """
    flat = tensor.detach().reshape(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=device or flat.device)
    for chunk in flat.split(CHUNK):
        bits = chunk.to(sums.device, dtype or chunk.dtype).contiguous()
        bits = bits.view(_BITS[bits.element_size()])
        wide = bits.to(torch.int32 if bits.element_size() < 4 else torch.int64)
        sums[0] += wide.sum(dtype=torch.int64)
        sums[1] += wide.square().sum(dtype=torch.int64)
    return sums


def compute_checksums(
    tensors: Iterable[tuple[str, Tensor, torch.dtype | None]], device: str | None = None
) -> dict[str, Checksum]:
    """Compute the checksum of each named tensor after rounding it to the given dtype; see ``sum_bits``."""
    found = [(name, tensor.numel(), sum_bits(tensor, dtype, device)) for name, tensor, dtype in tensors]
    if not found:
        return {}
    pairs = torch.stack([sums.to(found[0][2].device) for *_, sums in found]).tolist()
    return {name: Checksum(count, *pair) for (name, count, _), pair in zip(found, pairs, strict=True)}


def plain_name(name: str) -> str:
    """Remove the wrappers of FSDP, PEFT, checkpointing and torch.compile from a parameter's name.

    Example:
        >>> plain_name("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    return _WRAPPERS.sub("", name).removeprefix("base_model.model.").removeprefix(".")


@dataclass(frozen=True)
class Held:
    """A group of parameters on one rank of an engine that were loaded from the same tensors.

    Attributes:
        sources: names of the tensors that were loaded into these parameters, sorted.
        checksum: checksum of these parameters on this rank.
        dtype: torch's name for the dtype of the parameters.
    """

    sources: tuple[str, ...]
    checksum: Checksum
    dtype: str


@dataclass(frozen=True)
class Comparison:
    """Result of the comparison at one synchronisation; all names are the trainer's.

    Attributes:
        equal: tensors whose values are equal in the engine and the trainer.
        different: tensors whose values differ.
        unknown: tensors that cannot be judged, because the engine stores them in its own layout.
    """

    equal: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class HeldComparer:
    """Compares one engine's ranks with the trainer, over all synchronisations of a run."""

    def __init__(self) -> None:
        self._comparable: set[tuple[str, ...]] = set()
        self._own_layout: set[tuple[str, ...]] = set()
        self._before: dict[tuple[str, ...], tuple[Checksum, set[tuple[int, int]]]] = {}

    def compare(
        self,
        ranks: Sequence[Sequence[Held]],
        own: Mapping[str, Checksum],
        received: Mapping[str, Checksum] | None = None,
    ) -> Comparison:
        """Compare the trainer's checksums ``own``, by name, with those of all ranks of an engine.

        Ranks have either shards, whose checksums add up, or identical copies. A group in an engine-specific layout is
        judged only after it has been equal once. Until then, the only check is that the group changes when the
        trainer's tensors change. A layout counts as engine-specific if the number of elements fits neither shards nor
        copies (padding, or heads replicated on several ranks), or if the engine ``received`` the trainer's values but
        stores other values.
        """
        by_sources: dict[tuple[str, ...], list[Held]] = {}
        for held in (held for rank in ranks for held in rank):
            by_sources.setdefault(held.sources, []).append(held)
        found: dict[str, list[str]] = {"equal": [], "different": [], "unknown": []}
        for sources, parts in by_sources.items():
            names = sources if all(source in own for source in sources) else _name_fused(sources)
            if not names or not all(name in own for name in names):
                found["unknown"] += sources
                continue
            expected = add_checksums(own[name] for name in names)
            arrived = [(received or {}).get(source) for source in sources]
            whole = add_checksums(each for each in arrived if each is not None) if None not in arrived else None
            found[self._judge(sources, parts, expected, whole)] += sources
        return Comparison(**{name: tuple(sorted(each)) for name, each in found.items()})

    def _judge(
        self, sources: tuple[str, ...], parts: Sequence[Held], expected: Checksum, received: Checksum | None
    ) -> str:
        """Judge one group: ``equal``, ``different`` or ``unknown``."""
        copies = all(part.checksum.size == expected.size for part in parts)
        sharded = add_checksums(part.checksum for part in parts)
        sums = {part.checksum[1:] for part in parts} if copies else {sharded[1:]}
        before = self._before.get(sources)
        self._before[sources] = (expected, sums)
        if sums == {expected[1:]}:
            self._comparable.add(sources)
            return "equal"
        if not (copies or sharded.size == expected.size) or received == expected:
            self._own_layout.add(sources)
        if sources in self._comparable or sources not in self._own_layout:
            return "different"
        return "different" if before is not None and before[0] != expected and before[1] == sums else "unknown"


def compare_adapter(
    found: Comparison, adapter: Mapping[str, Checksum], own: Mapping[str, Checksum], *, loaded: bool
) -> Comparison:
    """Add a LoRA adapter's tensors, as the engine received them, to ``found``; ``loaded``: the adapter is loaded."""
    known = [name for name in sorted(adapter) if name in own]
    equal = tuple(name for name in known if loaded and adapter[name] == own[name])
    return replace(
        found,
        equal=found.equal + equal,
        different=found.different + tuple(name for name in known if name not in equal),
        unknown=found.unknown + tuple(name for name in sorted(adapter) if name not in own),
    )


def _name_fused(sources: Sequence[str]) -> tuple[str, ...]:
    """Convert the names of expert tensors that verl sends to the Hugging Face names of the fused parameters."""
    layers = {source.partition(".experts.")[0] for source in sources if ".experts." in source}
    kinds = {source.rpartition(".")[0].rpartition(".")[2] for source in sources}
    if len(layers) != 1 or not kinds <= {"gate_proj", "up_proj", "down_proj"}:
        return ()
    fused = {"down_proj" if kind == "down_proj" else "gate_up_proj" for kind in kinds}
    return tuple(f"{layer}.experts.{name}" for layer in layers for name in sorted(fused))


def find_left_out(trained: Sequence[str], received: Sequence[str]) -> list[str]:
    """Find the trained parameters for which no tensor was sent under any of verl's prefixes."""
    ends = {_end(name) for name in received}
    experts = {name.partition(".experts.")[0] for name in received if ".experts." in name}
    return [name for name in trained if _end(name) not in ends and name.partition(".experts.")[0] not in experts]


def _end(name: str) -> str:
    """Return a name from its layer onwards, or its last two parts if it contains no layer."""
    _, layers, end = name.partition("layers.")
    return end if layers else ".".join(name.split(".")[-2:])


SAMPLE = 256
"""Number of elements per parameter and rank whose changes are tracked."""
_SENT = "_offpolicy_sent"
AS_SENT = "as sent"
"""Stands for the dtype of tensors that the engine keeps as they were sent, such as LoRA's tensors."""


def weigh_own(worker: Any, default: str, others: Mapping[str, str]) -> dict[str, Any]:
    """Compute the checksums of this rank's weights.

    Args:
        worker: verl's actor worker.
        default: torch's name of the dtype of most of the engine's tensors.
        others: maps the plain name of each other tensor to its dtype or to ``AS_SENT``.

    Returns:
        ``weights`` maps each plain name to (count, sum, sum of squares, whether it is trained); ``sent`` is True if
        these are checksums of the tensors as sent; for ``update``, see ``UpdateSample.step``.
    """
    if _SENT in vars(worker):
        return {"weights": dict(vars(worker)[_SENT]), "sent": True, "update": []}
    module = _find_module(worker)
    shards: dict[str, tuple[str, Tensor, torch.dtype]] = {}
    trained = set()
    for full_name, parameter in module.named_parameters(remove_duplicate=False):
        if (shard := _find_shard(parameter)) is not None:
            name = plain_name(full_name)
            held = others.get(name, default)
            shards[name] = (name, shard, parameter.dtype if held == AS_SENT else getattr(torch, held))
            trained |= {name} if parameter.requires_grad else set()
    # Offloaded parameters are on the host, where computing their checksums would take seconds.
    weighed = compute_checksums(shards.values(), "cuda" if torch.cuda.is_available() else None)
    sample = vars(worker).setdefault("_offpolicy_sample", UpdateSample())
    update = sample.step(shard for name, shard in shards.items() if name in trained)
    weights = {name: [*each, int(name in trained)] for name, each in weighed.items()}
    return {"weights": weights, "sent": False, "update": update}


def _find_engine(worker: Any) -> Any:
    """Return verl's engine; None in a legacy worker."""
    return getattr(getattr(worker, "actor", None), "engine", None)


def _find_module(worker: Any) -> Any:
    """Return the trained model: a module, or Megatron's list of modules."""
    engine = _find_engine(worker)
    return getattr(worker, "actor_module_fsdp", None) if engine is None else engine.module


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _find_shard(parameter: Tensor) -> Tensor | None:
    """Return this rank's part of a parameter; None if another rank already counts these elements."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(parameter, DTensor):
        return parameter.detach() if _is_first_rank() else None
    place = parameter.device_mesh.get_coordinate()
    copies = zip(place or (), parameter.placements, strict=False)
    if place is None or any(at for at, kind in copies if isinstance(kind, Replicate)):
        return None
    shard: Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    return shard


class UpdateSample:
    """A few elements of each parameter, whose change between synchronisations is tracked."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def step(self, shards: Any) -> list[float]:
        """Return [sum of u r, sum of u^2, changed in u, changed in r, count] since the previous synchronisation.

        u is the change of an element, and r is the change after the engine's rounding. The first call returns an empty
        list.
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
    """Make a worker record checksums of the tensors that it sends, if it does not send its parameters themselves.

    Args:
        worker: verl's actor worker; for the legacy workers of 0.7.1, the rollout is patched instead.
        dtype: torch's name of the rollout engine's dtype.
    """
    if not _sends_other_tensors(worker):
        return
    vars(worker)[_SENT] = {}
    if (engine := _find_engine(worker)) is not None:
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
    """Yield the tensors to send; on rank 0, record their checksums after rounding as in the rollout engine."""
    noted: dict[str, list[int]] = vars(worker)[_SENT]
    for name, tensor in tensors:
        if _is_first_rank():
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
    engine = _find_engine(worker)
    # For other engines, and for models whose names verl converts, the names of the sent tensors differ from those of
    # the parameters.
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

    method: Callable[..., Any] = register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)(weigh_own)
    worker.weigh_offpolicy = method  # type: ignore[attr-defined]
