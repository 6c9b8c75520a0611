"""Routes as received: expert ids by token, decoder layer and position, checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .expert_choice import ReplayError

_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class RoutedLayers:
    """Layers of a model that have experts.

    Args:
        model: model type, for messages.
        depth: number of decoder layers, including dense ones.
        layers: absolute numbers of the layers with experts, ascending.
        experts: number of experts per layer.
        top_k: number of experts per token.
    """

    model: str
    depth: int
    layers: tuple[int, ...]
    experts: int
    top_k: int

    @property
    def dense(self) -> tuple[int, ...]:
        """Absolute numbers of the layers without experts."""
        return tuple(layer for layer in range(self.depth) if layer not in self.layers)


def find_routed_rows(routes: Tensor) -> Tensor:
    """Flag the tokens that have routes, which are not zero in all layers.

    Engines leave zeros where a token was never forwarded. With k = 1 these look like the routes of a token that went to
    expert 0 in each layer.

    Args:
        routes: (tokens, layers, k) integers.

    Returns:
        (tokens,) bool.
    """
    return (routes != 0).flatten(1).any(1)


def check_shape(routes: Tensor, rows: Tensor | None, to: RoutedLayers) -> None:
    """Check dtype and shape of routes.

    Args:
        routes: (tokens, depth, k).
        rows: (tokens,) bool, tokens that have routes; or None.

    Raises:
        ReplayError: names the given and the expected value.
    """
    if routes.dtype not in _DTYPES:
        raise ReplayError(f"routes are {routes.dtype}. Fix: give ids of experts as uint8, int16, int32 or int64.")
    if routes.dim() != 3 or routes.shape[1:] != (to.depth, to.top_k):
        raise ReplayError(
            f"routes have the shape {tuple(routes.shape)}, but {to.model} has {to.depth} decoder layers and "
            f"{to.top_k} experts per token. Fix: give (tokens, {to.depth}, {to.top_k}), dense layers included."
        )
    if rows is not None and (rows.dtype != torch.bool or rows.shape != routes.shape[:1]):
        raise ReplayError(
            f"rows are {rows.dtype} of shape {tuple(rows.shape)}, but routes have {len(routes)} tokens. Fix: give one "
            f"bool per token, True where it has routes."
        )


def check_ids(routes: Tensor, rows: Tensor, to: RoutedLayers) -> None:
    """Check that rows with routes name distinct experts in each layer with experts, and none in other layers.

    Args:
        routes: (tokens, depth, k) integers.
        rows: (tokens,) bool; False: not read.

    Raises:
        ReplayError: names the first wrong layer and row.
    """
    ids = routes[:, list(to.layers)]
    outside = (ids < 0) | (ids >= to.experts)
    _refuse(ids, outside.any(-1), rows, to.layers, f"but {to.model} has experts 0 to {to.experts - 1}")
    ordered = ids.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    _refuse(ids, twice, rows, to.layers, "an expert twice, which no router chooses")
    if to.dense:
        stray = routes[:, list(to.dense)]
        wrong = f"but layer(s) {list(to.dense)} of {to.model} have no experts"
        _refuse(stray, (stray != 0).any(-1), rows, to.dense, wrong)


def _refuse(ids: Tensor, wrong: Tensor, rows: Tensor, layers: Sequence[int], reason: str) -> None:
    """Raise if a row is wrong in a layer; wrong is (tokens, layers)."""
    if not (found := (wrong & rows[:, None]).nonzero().tolist()):
        return
    row, place = min(found, key=lambda each: (each[1], each[0]))
    raise ReplayError(
        f"the routes of layer {layers[place]} name experts {ids[row, place].tolist()} in row {row}, {reason}; "
        f"{len(found)} (row, layer) pairs are like this. Fix: check that the routes belong to this model, in the order "
        f"of its layers, and that rows without routes are zero in all layers."
    )
