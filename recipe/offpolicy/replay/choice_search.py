"""Search for a model's routers by a forward of a few tokens, whatever the model calls them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .expert_choice import ReplayError, find_scores
from .routes import RoutedLayers

TOKENS = 8
"""Length of the forward that the search runs."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def find_routers(
    model: nn.Module, inputs: Mapping[str, Any] | None = None
) -> tuple[RoutedLayers, dict[int, nn.Module]]:
    """Find the module of each layer whose forward chooses the token's experts, innermost first.

    Runs one forward without gradients, in which every rank of a sharded model takes part; dropout is off, and no state
    of a generator moves.

    Args:
        model: a causal language model of transformers, sharded or not.
        inputs: keyword arguments of the forward; None: a row of ``TOKENS`` tokens.

    Returns:
        The layers with experts, and the module that chooses in each, by absolute number.

    Raises:
        ReplayError: the model makes another number of choices than one in a layer that has experts, or in a module
            that lies in no layer.
    """
    name = type(model).__name__
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts, top_k = _read_size(name, config, _EXPERTS), _read_size(name, config, _TOP_K)
    paths = _list_choices(model, experts, top_k, inputs or _build_inputs(model, config))
    inside = [path for path in paths if _LAYER.search(f"{path}.")]
    # A loss that balances the load chooses again among all layers' scores, in a module above them.
    paths = [path for path in paths if path in inside or not any(_lies_in(other, path) for other in inside)]
    layers = Counter(_read_layer(name, path) for path in paths)
    if several := sorted(layer for layer, count in layers.items() if count > 1):
        raise _refuse(
            name,
            f"layer {several[0]} makes {layers[several[0]]} choices of {top_k} among {experts} experts in one forward, "
            f"in {sorted(path for path in paths if _read_layer(name, path) == several[0])}",
        )
    if silent := sorted(_find_experts(model) - set(layers)) if layers else list(range(config.num_hidden_layers)):
        raise _refuse(
            name, f"layer(s) {silent} make no choice of {top_k} among {experts} experts by torch.topk on 2-D scores"
        )
    found = {_read_layer(name, path): model.get_submodule(path) for path in paths}
    layout = RoutedLayers(name, config.num_hidden_layers, tuple(sorted(found)), experts, top_k)
    return layout, {layer: found[layer] for layer in layout.layers}


def _lies_in(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def _refuse(name: str, reason: str) -> ReplayError:
    return ReplayError(f"{name}: {reason}, so that its routes cannot be replayed. Fix: turn routing replay off.")


def _read_size(name: str, config: Any, keys: tuple[str, ...]) -> int:
    for key in keys:
        value = getattr(config, key, None)
        # HunYuan's may be lists, one value a layer.
        sizes = set(value) if isinstance(value, list | tuple) else {value}
        if len(sizes) > 1:
            raise _refuse(name, f"{key}={value} differs by layer")
        if isinstance(size := sizes.pop(), int):
            return size
    raise _refuse(name, f"its config has none of {', '.join(keys)}")


def _read_layer(name: str, path: str) -> int:
    numbers = _LAYER.findall(f"{path}.")
    if len(numbers) != 1:
        raise _refuse(name, f"the module {path or '(the model itself)'} chooses experts and lies in no `layers.<n>.`")
    return int(numbers[0])


def _find_experts(model: nn.Module) -> set[int]:
    """Numbers of the layers that have a module called experts."""
    paths = (path for path, _ in model.named_modules() if path.endswith(".experts"))
    return {int(numbers[0]) for path in paths if (numbers := _LAYER.findall(path))}


def _build_inputs(model: nn.Module, config: Any) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {"input_ids": torch.arange(TOKENS, device=device)[None] % config.vocab_size, "use_cache": False}


def _list_choices(model: nn.Module, experts: int, top_k: int, inputs: Mapping[str, Any]) -> list[str]:
    """List the path of the innermost module of each choice."""
    with _evaluated(model), torch.no_grad(), _running_modules(model) as running:
        search = _Search(experts, top_k, running)
        with search:
            model(**inputs)
    return search.paths


class _Search(TorchFunctionMode):
    """Notes in which module each choice is made."""

    def __init__(self, experts: int, top_k: int, running: list[str]) -> None:
        super().__init__()
        self.paths: list[str] = []
        self._sizes, self._running = (experts, top_k), running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if find_scores(func, args, kwargs, *self._sizes) is not None:
            self.paths.append(self._running[-1])
        return func(*args, **kwargs)


@contextmanager
def _running_modules(model: nn.Module) -> Iterator[list[str]]:
    """Yield the paths of the modules whose forward runs, outermost first."""
    running: list[str] = []
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and each module back into its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
