"""Replay of recorded routes in a whole model, without copying its routers' code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .choice_search import find_experts, find_routers
from .expert_choice import ChoiceRecord, ReplayError, RouterSlot
from .routes import RoutedLayers, check_ids, check_shape, find_routed_rows

_MARK = "_offpolicy_replay"


def install_replay(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> RoutedModel:
    """Find the routers of a model and wrap their forwards with replay.

    Unarmed routers run unchanged. On a sharded model every rank calls this together.

    Args:
        model: a causal language model of transformers, before or after sharding.
        inputs: keyword arguments of the forward that finds the routers; None: a row of a few tokens on the parameters'
            device, which differs from the forward's device if they are offloaded.

    Raises:
        ReplayError: the model chooses experts in an unsupported way, or has replay installed.
    """
    layout, routers = find_routers(model, inputs)
    if any(hasattr(router.forward, _MARK) for router in routers.values()):
        raise ReplayError(f"{layout.model} has routing replay installed. Fix: remove() the other one first.")
    return RoutedModel(layout, routers, find_experts(model))


class RoutedModel:
    """A model whose routers replay recorded routes.

    Args:
        layout: the layers with experts.
        routers: the choosing module of each layer, by absolute layer number.
        experts: the module that is called with the ids, for layers that have one.
    """

    def __init__(
        self,
        layout: RoutedLayers,
        routers: Mapping[int, nn.Module],
        experts: Mapping[int, nn.Module] | None = None,
    ) -> None:
        self.layout = layout
        self._slots = {layer: RouterSlot(layer, layout.experts, layout.top_k) for layer in routers}
        self._routers = dict(routers)
        self._replaced = {layer: vars(router).get("forward") for layer, router in routers.items()}
        for layer, router in routers.items():
            router.forward = _wrap(router.forward, self._slots[layer])
        called = (experts or {}).items()
        self._hooks = [_note_entries(module, self._slots[layer]) for layer, module in called if layer in routers]

    def arm(self, routes: Tensor, rows: Tensor | None = None) -> None:
        """Replay these routes in each forward from now on.

        Activation checkpointing runs a forward again in its backward: disarm, or arm again, after the backward.

        Args:
            routes: (tokens, depth, k) uint8, int16, int32 or int64, for the tokens of one forward in their order;
                layers are numbered as in the model, and values are zero in layers without experts.
            rows: (tokens,) bool, tokens with routes; None: tokens that are not zero in all layers. The other tokens
                are routed natively.

        Raises:
            ReplayError: dtype, shape or ids do not fit; nothing is armed.
        """
        self.disarm()
        check_shape(routes, rows, self.layout)
        rows = find_routed_rows(routes) if rows is None else rows.to(routes.device)
        check_ids(routes, rows, self.layout)
        for layer, slot in self._slots.items():
            slot.arm(routes[:, layer], rows)

    def record_own(self) -> None:
        """Record the routers' own choice in each forward from now on."""
        for slot in self._slots.values():
            slot.arm()

    def disarm(self) -> None:
        """Stop recording and replaying; records stay until the next arming."""
        for slot in self._slots.values():
            slot.disarm()

    def get_records(self) -> dict[int, ChoiceRecord]:
        """Return the choice of each layer in the last forward since the arming, by absolute layer number.

        Raises:
            ReplayError: a layer made no choice since the arming.
        """
        if missing := [layer for layer, slot in self._slots.items() if slot.record is None]:
            raise ReplayError(
                f"layer(s) {missing} of {self.layout.model} have chosen no experts since routing replay was armed. "
                f"Fix: run the whole model between arming and reading."
            )
        return {layer: slot.record for layer, slot in self._slots.items() if slot.record is not None}

    def count_entered(self) -> Tensor:
        """Count the replayed tokens of the last forward, as seen by the experts.

        Returns:
            (layers, 3) int64 in the order of ``layout.layers``: tokens replayed; of these, tokens with whose ids the
            experts were called, and tokens whose own choice was the same set. For experts that are not called by ids,
            the router's return value is counted.

        Raises:
            ReplayError: a layer made no choice since the arming.
        """
        counts = []
        for layer, record in self.get_records().items():
            slot = self._slots[layer]
            entered = record.ids if slot.entered is None else slot.entered
            same = (entered == slot.get_shipped(record)).all(-1) & record.replayed
            counts.append(torch.stack([record.count_replayed(), same.sum(), record.count_equal()]))
        return torch.stack(counts)

    def watch_gradients(self, on: bool) -> None:
        """Turn the summing of gradients of the routers' scores on or off."""
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
        records = self.get_records()
        dense = torch.zeros_like(next(iter(records.values())).ids)
        return torch.stack(
            [records[layer].ids if layer in records else dense for layer in range(self.layout.depth)], dim=1
        )

    def remove(self) -> None:
        """Restore the routers' original forwards."""
        self.disarm()
        for hook in self._hooks:
            hook.remove()
        for layer, router in self._routers.items():
            del router.forward
            if (replaced := self._replaced[layer]) is not None:
                router.forward = replaced


def _wrap(forward: Callable[..., Any], slot: RouterSlot) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return slot.run(forward, args, kwargs)

    setattr(run, _MARK, True)
    return run


def _note_entries(experts: nn.Module, slot: RouterSlot) -> RemovableHandle:
    """Make the slot record the ids with which the experts are called."""

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dtype == torch.int64 and value.shape[1:] == (slot.top_k,):
                slot.note_entry(value)

    return experts.register_forward_pre_hook(note, with_kwargs=True)
