"""Replay of recorded routes in a whole model; a forward pass finds the routers, so no module names are needed."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .expert_choice import (
    ChoiceRecord,
    ReplayError,
    RoutedLayers,
    RouterSlot,
    check_ids,
    check_shape,
    find_scores,
)

TOKENS = 8
"""Number of tokens in the forward pass by which routers are found."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def find_routers(
    model: nn.Module, inputs: Mapping[str, Any] | None = None
) -> tuple[RoutedLayers, dict[int, nn.Module]]:
    """For each layer, find the innermost module whose forward chooses the tokens' experts.

    This function runs one or two forwards without gradients; for a sharded model, all ranks must call it together.
    Dropout is off, and the states of random generators do not change.

    Args:
        model: a causal language model of transformers, sharded or not.
        inputs: keyword arguments of the forward; None: a row of ``TOKENS`` tokens on the parameters' device.

    Returns:
        The layers with experts, and absolute layer number -> the module that chooses the experts.

    Raises:
        ReplayError: the model does not make exactly one choice per layer with experts, chooses experts in a module
            outside the layers, or weights experts by masked scores.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    # Sharding replaces the model's class.
    name: str = getattr(model.config, "model_type", None) or type(model).__name__
    experts, top_k = _read_size(name, config, _EXPERTS), _read_size(name, config, _TOP_K)
    if inputs is None:
        ids = torch.arange(TOKENS, device=next(model.parameters()).device)[None] % config.vocab_size
        inputs = {"input_ids": ids, "use_cache": False}
    search = _search(model, experts, top_k, inputs)
    inside = [path for path in search.paths if _LAYER.search(f"{path}.")]
    # A load-balancing loss calls topk again, on all layers' scores, in a module above the layers.
    paths = [
        path
        for path in search.paths
        if path in inside or not any(other.startswith(path and f"{path}.") for other in inside)
    ]
    for layer, count in sorted(Counter(_read_layer(name, path) for path in paths).items()):
        if count > 1:
            where = sorted(path for path in paths if _read_layer(name, path) == layer)
            choices = f"{count} choices of {top_k} among {experts} experts in one forward, in {where}"
            raise _refuse(name, f"layer {layer} makes {choices}")
    found = {_read_layer(name, path): model.get_submodule(path) for path in paths}
    layout = RoutedLayers(name, config.num_hidden_layers, tuple(sorted(found)), experts, top_k)
    if silent := sorted(find_experts(model).keys() - set(found)) if found else list(range(layout.depth)):
        raise _refuse(
            name, f"layer(s) {silent} make no choice of {top_k} among {experts} experts by torch.topk on 2-D scores"
        )
    if layout.layers[-1] >= layout.depth:
        raise _refuse(
            name, f"layer {layout.layers[-1]} chooses experts, but the model has num_hidden_layers={layout.depth}"
        )
    if search.met_masked and _search(model, experts, top_k, inputs, poison=True).reached_output:
        raise _refuse(name, "the model weights experts by scores that it masks for all groups that were not chosen")
    return layout, {layer: found[layer] for layer in layout.layers}


def _refuse(name: str, reason: str) -> ReplayError:
    return ReplayError(f"{name}: {reason}, so its routes cannot be replayed. Fix: turn routing replay off.")


def _read_size(name: str, config: Any, keys: tuple[str, ...]) -> int:
    for key in keys:
        value = getattr(config, key, None)
        # In HunYuan's configuration, these values may be lists with one value per layer.
        sizes = set(value) if isinstance(value, list | tuple) else {value}
        if len(sizes) > 1:
            raise _refuse(name, f"{key}={value} differs by layer")
        if isinstance(size := sizes.pop(), int):
            return size
    raise _refuse(name, f"the model's config contains none of the keys {', '.join(keys)}")


def _read_layer(name: str, path: str) -> int:
    numbers = _LAYER.findall(f"{path}.")
    if len(numbers) != 1:
        raise _refuse(
            name,
            f"the module {path or '(the model itself)'} chooses experts, but its path contains no `layers.<n>.`, so "
            "its layer number is unknown",
        )
    return int(numbers[0])


def find_experts(model: nn.Module) -> dict[int, nn.Module]:
    """Find the modules named ``experts``, by absolute layer number."""
    named = ((path, module) for path, module in model.named_modules() if path.endswith(".experts"))
    return {int(numbers[0]): module for path, module in named if (numbers := _LAYER.findall(path))}


def _search(model: nn.Module, experts: int, top_k: int, inputs: Mapping[str, Any], poison: bool = False) -> _Search:
    with _evaluated(model), torch.no_grad(), _running_modules(model) as running:
        search = _Search(experts, top_k, running, poison)
        with search:
            output = model(**inputs)
    search.reached_output = bool(getattr(output, "logits", output).isnan().any())
    return search


class _Search(TorchFunctionMode):
    """Records the module in which each choice is made.

    Args:
        experts, top_k: size of a choice.
        running: paths of the modules whose forward is currently running.
        poison: True to make the chosen scores NaN; if NaN reaches the output, experts are weighted by these scores.
    """

    def __init__(self, experts: int, top_k: int, running: list[str], poison: bool) -> None:
        super().__init__()
        self.paths: list[str] = []
        """Path of the innermost module at each choice."""
        self.met_masked = self.reached_output = False
        self._sizes, self._running, self._poison = (experts, top_k), running, poison

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        scores = find_scores(func, args, kwargs, *self._sizes)
        if scores is None:
            return result
        self.paths.append(self._running[-1])
        self.met_masked |= _is_masked(scores)
        return torch.return_types.topk((torch.full_like(result[0], torch.nan), result[1])) if self._poison else result


def _is_masked(scores: Tensor) -> bool:
    """Return True if each token has scores of -inf (or probabilities of 0), the mark of unchosen groups."""
    zeros = (scores == 0) & (scores.amin(-1, keepdim=True) == 0) & (scores.amax(-1, keepdim=True) > 0)
    return bool((zeros | scores.isneginf()).any(-1).all())


@contextmanager
def _running_modules(model: nn.Module) -> Iterator[list[str]]:
    """Yield the paths of the modules whose forward is running, outermost first."""
    running: list[str] = []

    def leave(*_: Any) -> None:
        running.pop()

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and restore the mode of each module afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def install_replay(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> RoutedModel:
    """Find the routers of a model and wrap their forwards with replay.

    Routers behave as usual until ``arm`` is called. For a sharded model, all ranks must call this function together.

    Args:
        model: a causal language model of transformers, before or after sharding.
        inputs: keyword arguments of the forward that finds the routers; None: a row of a few tokens on the parameters'
            device. If parameters are offloaded, this is not the device of the forward.

    Raises:
        ReplayError: the model chooses experts in an unsupported way.
    """
    layout, routers = find_routers(model, inputs)
    return RoutedModel(layout, routers, find_experts(model))


class RoutedModel:
    """A model whose routers replay recorded routes.

    Args:
        layout: the layers with experts.
        routers: absolute layer number -> the module that chooses the layer's experts.
        experts: the module that is called with the ids, for layers that have one.
    """

    def __init__(
        self, layout: RoutedLayers, routers: Mapping[int, nn.Module], experts: Mapping[int, nn.Module]
    ) -> None:
        self.layout = layout
        self._slots = {layer: RouterSlot(layer, layout.experts, layout.top_k) for layer in routers}
        for layer, router in routers.items():
            router.forward = _wrap(router.forward, self._slots[layer])
            if layer in experts:
                _note_entries(experts[layer], self._slots[layer])

    def arm(self, routes: Tensor, rows: Tensor | None = None) -> None:
        """Replay these routes in all following forwards.

        Activation checkpointing recomputes a forward during its backward, so call ``disarm`` or ``arm`` only after the
        backward.

        Args:
            routes: (tokens, depth, k) uint8, int16, int32 or int64, for the tokens of one forward in their order;
                layers are numbered as in the model, and values are zero in layers without experts.
            rows: (tokens,) bool, tokens with routes; None: tokens whose routes are nonzero in at least one layer. All
                other tokens are routed natively.

        Raises:
            ReplayError: shape or ids do not match the model; the routers are then left unchanged.
        """
        self.disarm()
        check_shape(routes, self.layout)
        rows = (routes != 0).flatten(1).any(1) if rows is None else rows.to(routes.device)
        check_ids(routes, rows, self.layout)
        for layer, slot in self._slots.items():
            slot.arm(routes[:, layer], rows)

    def record_own(self) -> None:
        """Record the routers' own choices in all following forwards."""
        for slot in self._slots.values():
            slot.arm()

    def disarm(self) -> None:
        """Stop recording and replaying; records are kept until the routers are armed again."""
        for slot in self._slots.values():
            slot.disarm()

    def get_records(self) -> dict[int, ChoiceRecord]:
        """Return each layer's choice in the last forward since the model was armed, by absolute layer number.

        Raises:
            ReplayError: a layer made no choice since the arming.
        """
        if missing := [layer for layer, slot in self._slots.items() if slot.record is None]:
            raise ReplayError(
                f"layer(s) {missing} of {self.layout.model} have chosen no experts since recording or replay began. "
                "Fix: run a forward of the whole model before reading its routes."
            )
        return {layer: slot.record for layer, slot in self._slots.items() if slot.record is not None}

    def count_entered(self) -> Tensor:
        """Count the replayed tokens of the last forward, and compare them with the ids passed to the experts.

        Returns:
            (layers, 3) int64 in the order of ``layout.layers``: replayed tokens; among these, tokens for which the
            experts were called with the replayed ids, and tokens for which the router itself chose the same set. For
            experts that are not called with ids, the router's return value is used instead.

        Raises:
            ReplayError: a layer made no choice since the arming.
        """
        counts = []
        for layer, record in self.get_records().items():
            slot = self._slots[layer]
            entered = record.ids if slot.entered is None else slot.entered
            shipped = record.ids if slot.ids is None else slot.ids.to(record.ids.device, torch.int64)
            same = (entered == shipped).all(-1) & record.replayed
            counts.append(torch.stack([record.count_replayed(), same.sum(), record.count_equal()]))
        return torch.stack(counts)

    def watch_gradients(self, on: bool) -> None:
        """Start or stop summing the gradients of the routers' scores."""
        for slot in self._slots.values():
            slot.gradient = torch.zeros(()) if on else None

    def get_gradients(self) -> list[float]:
        """Return the sum of |gradient| of each layer's scores since watching began, in the order of the layers."""
        return [float(slot.gradient) for slot in self._slots.values() if slot.gradient is not None]

    def stack_ids(self) -> Tensor:
        """Stack the ids passed to the experts in the last forward.

        Returns:
            (tokens, depth, k) int64, in the format of ``arm``: 0 in layers without experts.

        Raises:
            ReplayError: a layer made no choice since the arming.
        """
        ids = {layer: record.ids for layer, record in self.get_records().items()}
        dense = torch.zeros_like(next(iter(ids.values())))
        return torch.stack([ids.get(layer, dense) for layer in range(self.layout.depth)], dim=1)


def _wrap(forward: Callable[..., Any], slot: RouterSlot) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return slot.run(forward, args, kwargs)

    return run


def _note_entries(experts: nn.Module, slot: RouterSlot) -> None:
    """Make the slot record the ids with which the experts are called."""

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()) if slot.armed is not None else ():
            if isinstance(value, Tensor) and value.dtype == torch.int64 and value.shape[1:] == (slot.top_k,):
                slot.entered = value

    experts.register_forward_pre_hook(note, with_kwargs=True)
