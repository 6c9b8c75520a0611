"""Records in a rollout engine's processes which parameters each tensor is loaded into, and computes their checksums.

Patched functions, the same from verl 0.7.1 to 0.9.1:
``vLLMColocateWorkerExtension._update_weights(weights, peft_config, base_sync_done)``, which calls
``model.load_weights`` (the result of that call names the written parameters), and ``vLLMHttpServer.collective_rpc``,
which returns nothing in verl.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_patches import rollout_seams

from ..fault_tolerance.watchdog import FAILURE
from .checksums import add_checksums, compute_checksums, plain_name

METHOD = "weigh_offpolicy"
"""Name of the method added to an engine's workers."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass
class Sources:
    """Tensors that a worker of the engine has received.

    Attributes:
        names: plain names of all tensors.
        targets: maps a plain name, without the number of an expert, to the parameters into which the tensor was loaded.
        tied: names of tensors that vLLM loads only together with the tensor to which they are tied.
        received: number of tensors since the last comparison.
        first: checksums of the received tensors, rounded like the parameters into which they were loaded; kept until
            the first comparison.
        adapter: checksums of the LoRA adapter's tensors as received, by plain name.
        skipped: the reason why the weights are not compared; empty if they are compared.
    """

    names: set[str] = field(default_factory=set)
    targets: dict[str, set[str]] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    received: int = 0
    first: dict[str, list[int]] | None = field(default_factory=dict)
    adapter: dict[str, list[int]] = field(default_factory=dict)
    skipped: str = ""


def _key(name: str) -> str:
    return _EXPERT.sub(".experts.", name)


def load_observed(
    load: Callable[..., Any],
    sources: Sources,
    weights: Iterable[tuple[str, Tensor]],
    dtype_of: Callable[[str], torch.dtype | None] = lambda target: None,
) -> Any:
    """Load weights with the model's own ``load``, and record which parameters each new name is loaded into.

    A tensor whose name is new is loaded alone; the experts of a layer count as one name. A tied tensor that vLLM
    refuses to load alone is left out: vLLM loads the tensor to which it is tied, which verl may send in another bucket.

    Args:
        dtype_of: returns the dtype of a parameter by its name; None if there is none.
    """
    known: list[tuple[str, Tensor]] = []
    loaded: set[str] = set()
    for given, tensor in weights:
        name = plain_name(given)
        key = _key(name)
        sources.received += 1
        sources.names.add(name)
        if key in sources.tied:
            continue
        if sources.targets.get(key) is None:
            try:
                found = load([(given, tensor)])
            except ValueError as error:
                # vLLM 0.31: "... was skipped because it is tied to ... but ... was not found in the checkpoint"
                if "was skipped because it is tied to" not in str(error):
                    raise
                sources.tied.add(key)
                continue
            if not isinstance(found, set):
                sources.skipped = "the model does not report which parameters it loads"
            elif found or key == name:  # this rank may hold other experts
                sources.targets[key] = found
            loaded |= found or set()
        else:
            known.append((given, tensor))
        if sources.first is not None and (targets := sources.targets.get(key)):
            dtype = dtype_of(min(targets))
            sources.first[name] = list(*compute_checksums([(name, tensor, dtype)]).values())
    return loaded | (load(known) or set()) if known else loaded


def observe_update(
    update: Callable[..., Any], worker: Any, weights: Any, peft_config: Any, base_sync_done: Any, quantised: bool
) -> Any:
    """Run verl's ``_update_weights`` and record which parameters it loads."""
    sources = vars(worker).setdefault("_offpolicy_sources", Sources())
    if peft_config and base_sync_done:
        given = [(plain_name(name), tensor, None) for name, tensor in weights]
        sources.received += len(given)
        sources.adapter |= {name: list(each) for name, each in compute_checksums(given).items()}
        return update(worker, weights, peft_config, base_sync_done)
    if quantised:
        sources.received += len(weights)
        sources.skipped = "the engine quantises its weights"
        return update(worker, weights, peft_config, base_sync_done)
    model = worker.model_runner.model
    load = model.load_weights

    def dtype_of(target: str) -> torch.dtype | None:
        tensor = _list_tensors(model).get(target)
        return None if tensor is None else tensor.dtype

    model.load_weights = lambda given: load_observed(load, sources, given, functools.cache(dtype_of))
    try:
        return update(worker, weights, peft_config, base_sync_done)
    finally:
        del model.load_weights


def _list_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """List the parameters and buffers of a model by name."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def weigh_parameters(worker: Any) -> dict[str, Any]:
    """Compute the checksum of each group of parameters that were loaded from the same tensors.

    Args:
        worker: vLLM's worker with verl's extension.
    """
    sources: Sources = vars(worker).setdefault("_offpolicy_sources", Sources())
    held = _list_tensors(worker.model_runner.model)
    groups = _group(sources, held)
    weighed = compute_checksums(
        (f"{number} {name}", held[name], None) for number, (_, names) in enumerate(groups) for name in names
    )
    rows: list[list[Any]] = []
    for number, (given, names) in enumerate(groups):
        whole = add_checksums(weighed[f"{number} {name}"] for name in names)
        rows.append([given, *whole, str(held[names[0]].dtype).removeprefix("torch.")])
    found = {
        "groups": rows,
        "received": sources.received,
        "skipped": sources.skipped,
        "adapter": sources.adapter,
        "adapters": sorted(worker.list_loras()) if sources.adapter else [],
        "names": sorted(sources.names),
        "first": sources.first or {},
    }
    sources.received, sources.first = 0, None
    return found


def _group(sources: Sources, held: dict[str, Tensor]) -> list[tuple[list[str], list[str]]]:
    """Group tensors that were loaded into the same parameters; return each group's sorted tensors and parameters."""
    names_of: dict[str, set[str]] = {}
    for name in sources.names:
        names_of.setdefault(_key(name), set()).add(name)
    groups: list[tuple[set[str], set[str]]] = []
    group_of: dict[str, tuple[set[str], set[str]]] = {}
    for key, targets in sources.targets.items():
        given, names = names_of.get(key, set()), targets & held.keys()
        for group in {id(group_of[name]): group_of[name] for name in names if name in group_of}.values():
            groups.remove(group)
            given, names = given | group[0], names | group[1]
        if names:
            groups.append((given, names))
            group_of |= dict.fromkeys(names, groups[-1])
    return [(sorted(given), sorted(names)) for given, names in groups if given]


def tell_root_cause(error: BaseException) -> str:
    """Describe the first exception of a chain, and where it was raised, in one line.

    vLLM passes on only the text of the last exception, which may come from the clean-up, or may be just a missing key.
    """
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (in {place.name}, {place.filename}:{place.lineno})"


def extend_worker() -> None:
    """Make verl's extension of vLLM's workers record what it loads and compute checksums. Idempotent."""
    from verl.workers.rollout.vllm_rollout import utils

    extension = utils.vLLMColocateWorkerExtension
    if hasattr(extension, METHOD):
        return
    for seam in rollout_seams.build_weight_receivers()[:2]:
        seam.check()
    update = extension._update_weights

    # Start-up checks compare signatures; because of ``functools.wraps``, they see the original signature.
    @functools.wraps(update)
    def _update_weights(self: Any, weights: Any, peft_config: Any, base_sync_done: Any) -> Any:
        qat = getattr(self, "_is_qat_model", False) or getattr(self, "_is_modelopt_qat", False)
        quantised = qat or getattr(self.model_runner.vllm_config, "quant_config", None) is not None
        return observe_update(update, self, list(weights), peft_config, base_sync_done, quantised)

    receive = extension.update_weights_from_ipc

    @functools.wraps(receive)
    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return receive(self, *args, **kwargs)
        except Exception as error:
            raise RuntimeError(tell_root_cause(error)) from error

    extension.update_weights_from_ipc = update_weights_from_ipc
    extension._update_weights = _update_weights
    setattr(extension, METHOD, weigh_parameters)


def extend_server() -> None:
    """Make verl's vLLM server return its workers' answers to ``METHOD``, and store why an update failed. Idempotent."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    call = vLLMHttpServer.collective_rpc
    if getattr(call, "__offpolicy__", False):
        return
    rollout_seams.build_weight_receivers()[2].check()

    @functools.wraps(call)
    async def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if method == METHOD:
            return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)
        try:
            return await call(self, method, timeout=timeout, args=args, kwargs=kwargs)
        except Exception as error:
            # The sender of the weights is still waiting for the engine's acknowledgement, and does not see this error.
            if str(method).startswith("update_"):
                server = f"rollout server {getattr(self, 'replica_rank', '?')}"
                told = f"{server} could not run {method}: {type(error).__name__}: {error}."
                setattr(self, FAILURE, f"{told} The engine's traceback is in the log above; fix its cause.")
            raise

    collective_rpc.__offpolicy__ = True  # type: ignore[attr-defined]
    vLLMHttpServer.collective_rpc = collective_rpc
