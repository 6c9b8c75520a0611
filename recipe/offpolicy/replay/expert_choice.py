"""Replaces a router's choice of experts with recorded ids, and checks these ids against the model.

A router in the transformers library chooses experts with a single ``topk`` over their scores, (tokens, experts). Replay
replaces the result of ``topk`` with the scores at the given ids. The model still decides how to use these scores
(softmax before or after, bias, groups, scaling), and gradients reach the gate (R3, Ma et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, Tensor.topk)


class ReplayError(RuntimeError):
    """The model's routers cannot be replayed, or the routes do not match the model."""


@dataclass(frozen=True)
class ChoiceRecord:
    """Experts that one layer used in its last forward.

    Args:
        ids: (tokens, k) int64, the ids passed to the experts.
        own: (tokens, k) int64, the ids that the router itself chose.
        replayed: (tokens,) bool, rows whose choice was replaced.
    """

    ids: Tensor
    own: Tensor
    replayed: Tensor

    def count_replayed(self) -> Tensor:
        """Count the rows whose choice was replaced: () int64."""
        return self.replayed.sum()

    def count_equal(self) -> Tensor:
        """Count the replayed rows for which the router itself chose the same set of experts: () int64."""
        return (equal_sets(self.ids, self.own) & self.replayed).sum()


class RouterSlot:
    """Replay state of one layer's router.

    Args:
        layer: absolute number of the decoder layer.
        experts: number of experts.
        top_k: number of experts per token.
    """

    def __init__(self, layer: int, experts: int, top_k: int) -> None:
        self.layer, self.experts, self.top_k = layer, experts, top_k
        self.record: ChoiceRecord | None = None
        """Record of the last forward after ``arm`` was called. A recomputed forward writes the same values again."""
        self.armed: object | None = None
        self._ran_under: object | None = None
        self.ids: Tensor | None = None
        self._rows: Tensor | None = None
        self.entered: Tensor | None = None
        """(tokens, k) ids with which the experts were called in the last forward; None if they are not called with
        ids."""
        self.gradient: Tensor | None = None
        """() float32, sum of |gradient| of the router's scores since the last reset; None if gradients are not
        watched."""

    def arm(self, ids: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Start recording, and start replaying if ids are given.

        Args:
            ids: (tokens, k) of any integer dtype, distinct in each row; None: record the router's own choice.
            rows: (tokens,) bool, rows to replay; None: all rows.
        """
        self.armed, self.record, self.entered = object(), None, None
        self.ids, self._rows = ids, rows

    def disarm(self) -> None:
        """Stop recording and replaying; the last record is kept."""
        self.armed = self.ids = self._rows = None

    def run(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward pass of the module that chooses the experts.

        Raises:
            ReplayError: the module did not choose experts exactly once, or is recomputed for a backward while armed
                with other routes.
        """
        self._check_recomputation()
        if self.armed is None:
            return forward(*args, **kwargs)
        with _Replacement(self) as replacement:
            result = forward(*args, **kwargs)
        if replacement.count != 1:
            raise ReplayError(
                f"the router of layer {self.layer} made {replacement.count} choices of {self.top_k} among "
                f"{self.experts} experts in one forward instead of 1. Fix: prevent kernels and compilers from "
                "replacing this block's forward, or turn routing replay off."
            )
        return result

    def add_gradient(self, gradient: Tensor) -> None:
        """Add the absolute values of a gradient of the router's scores to ``gradient``."""
        if self.gradient is not None:
            self.gradient = self.gradient + gradient.float().abs().sum()

    def choose(self, scores: Tensor, own: Any) -> Any:
        """Choose the experts of one forward, and record them.

        Args:
            scores: (tokens, experts), the router's scores.
            own: the router's own choice, as ``torch.topk`` returns it.

        Returns:
            A result in the form of ``torch.topk``.

        Raises:
            ReplayError: the number of tokens differs from the number of rows of ids.
        """
        chosen: Tensor = own[1]
        if self.ids is None:
            self.record = ChoiceRecord(chosen, chosen, torch.zeros_like(chosen[:, 0], dtype=torch.bool))
            return own
        if len(self.ids) != len(scores):
            raise ReplayError(
                f"layer {self.layer} routes {len(scores)} tokens, but routes of {len(self.ids)} tokens were given. "
                "Fix: pass one row of ids for each token of this forward, in order, including padding."
            )
        ids = self.ids.to(scores.device, torch.int64)
        rows = torch.ones_like(chosen[:, 0], dtype=torch.bool) if self._rows is None else self._rows.to(scores.device)
        entered = torch.where(rows[:, None], ids, chosen)
        self.record = ChoiceRecord(entered, chosen, rows)
        return torch.return_types.topk((scores.gather(-1, entered), entered))

    def _check_recomputation(self) -> None:
        # The graph task's id is -1 outside of a backward; torch.utils.checkpoint uses the same test.
        if torch._C._current_graph_task_id() == -1:
            self._ran_under = self.armed
        elif self._ran_under is not self.armed:
            raise ReplayError(
                f"layer {self.layer} is recomputed for its backward with different routes from its forward. Fix: "
                "disarm, or arm with the next routes, only after the backward."
            )


class _Replacement(TorchFunctionMode):
    """Torch function mode that lets a slot intercept its router's choice of experts."""

    def __init__(self, slot: RouterSlot) -> None:
        super().__init__()
        self.count = 0
        self._slot, self._watches = slot, slot.gradient is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._watches and _is_scored(result, self._slot.experts):
            # The first tensor of this shape is the gate's output.
            self._watches = False
            result.register_hook(self._slot.add_gradient)
        scores = find_scores(func, args, kwargs, self._slot.experts, self._slot.top_k)
        if scores is None:
            return result
        self.count += 1
        return self._slot.choose(scores, result)


def find_scores(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], experts: int, top_k: int) -> Tensor | None:
    """Return the (tokens, experts) scores if a torch call chooses ``top_k`` of ``experts`` experts, and None otherwise.

    A choice among expert groups is ignored; its scores have a different width.
    """
    if func not in _TOPK:
        return None
    names = ("input", "k", "dim", "largest")
    given = {"dim": -1, "largest": True, **dict(zip(names, args, strict=False)), **kwargs}
    scores: Tensor = given["input"] if "input" in given else given["self"]
    over_experts = scores.dim() == 2 and scores.shape[-1] == experts and given["dim"] in (-1, 1)
    return scores if over_experts and given["k"] == top_k and given["largest"] else None


def _is_scored(result: Any, experts: int) -> bool:
    return isinstance(result, Tensor) and result.dim() == 2 and result.shape[-1] == experts and result.requires_grad


def equal_sets(ids: Tensor, other: Tensor) -> Tensor:
    """Flag rows that contain the same experts in any order.

    Args:
        ids, other: (..., k) integers.

    Returns:
        (...) bool.

    Example:
        >>> equal_sets(torch.tensor([[3, 1], [3, 1]]), torch.tensor([[1, 3], [1, 2]]))
        tensor([ True, False])
    """
    return (ids.sort(-1).values == other.sort(-1).values).all(-1)


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of a model in which there are experts.

    Args:
        model: model type, for messages.
        depth: number of decoder layers, including dense layers.
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


def check_shape(routes: Tensor, to: RoutedLayers) -> None:
    """Check the shape of routes.

    Args:
        routes: (tokens, depth, k).

    Raises:
        ReplayError: names the given and the expected value.
    """
    if routes.dim() != 3 or routes.shape[1:] != (to.depth, to.top_k):
        raise ReplayError(
            f"routes have the shape {tuple(routes.shape)}, but {to.model} has {to.depth} decoder layers and {to.top_k} "
            f"experts per token. Fix: pass routes of shape (tokens, {to.depth}, {to.top_k}), where the layers include "
            "dense layers."
        )


def check_ids(routes: Tensor, rows: Tensor, to: RoutedLayers) -> None:
    """Check that rows with routes have distinct experts in each layer with experts, and zeros in all other layers.

    Args:
        routes: (tokens, depth, k) integers.
        rows: (tokens,) bool, the rows to check.

    Raises:
        ReplayError: names the first wrong layer and row.
    """
    ids = routes[:, list(to.layers)]
    outside = (ids < 0) | (ids >= to.experts)
    _refuse(ids, outside.any(-1), rows, to.layers, f"but {to.model} has experts 0 to {to.experts - 1}")
    ordered = ids.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    _refuse(
        ids, twice, rows, to.layers, "which contain an expert twice, although a router never chooses an expert twice"
    )
    if to.dense:
        stray = routes[:, list(to.dense)]
        wrong = f"but layer(s) {list(to.dense)} of {to.model} have no experts"
        _refuse(stray, (stray != 0).any(-1), rows, to.dense, wrong)


def _refuse(ids: Tensor, wrong: Tensor, rows: Tensor, layers: Sequence[int], reason: str) -> None:
    """Raise an error if a row is wrong in a layer; ``wrong`` is (tokens, layers)."""
    if not (found := (wrong & rows[:, None]).nonzero().tolist()):
        return
    row, place = min(found, key=lambda each: (each[1], each[0]))
    raise ReplayError(
        f"the routes of layer {layers[place]} name experts {ids[row, place].tolist()} in row {row}, {reason}; "
        f"{len(found)} (row, layer) pairs are affected. Fix: check that the routes come from this model, that they "
        "are in the order of its layers, and that rows without routes are zero in all layers."
    )
