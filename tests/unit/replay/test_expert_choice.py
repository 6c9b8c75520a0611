"""One router's choice, and the routes that it accepts: four experts, of which two are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.replay.expert_choice import (
    ReplayError,
    RoutedLayers,
    RouterSlot,
    check_ids,
    check_shape,
    find_scores,
)

SCORES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.0, 0.2], [0.2, 0.3, 0.4, 0.1]])


def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(scores, 2, dim=-1)
    return values, ids


def run(slot: RouterSlot, forward: Callable[[Tensor], Any] = choose) -> Any:
    return slot.run(forward, (SCORES,), {})


def new_slot() -> RouterSlot:
    return RouterSlot(layer=5, experts=4, top_k=2)


def test_a_router_without_its_choice_is_refused() -> None:
    slot = new_slot()
    slot.arm()
    with pytest.raises(ReplayError, match="router of layer 5 made 0 choices of 2 among 4 experts"):
        run(slot, lambda scores: scores.argmax(-1))
    with pytest.raises(ReplayError, match="layer 5 made 2 choices"):
        run(slot, lambda scores: (choose(scores), choose(scores)))


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    slot = new_slot()
    slot.arm(torch.tensor([[3, 0]]))
    with pytest.raises(ReplayError, match="layer 5 routes 3 tokens, but routes of 1 tokens were given"):
        run(slot)


@pytest.mark.parametrize(
    ("call", "is_choice"),
    [
        ((torch.topk, (SCORES, 2), {}), True),
        ((torch.topk, (), {"input": SCORES, "k": 2, "dim": -1}), True),
        ((torch.topk, (SCORES, 2, 0), {}), False),
        ((torch.topk, (SCORES, 1), {}), False),
        ((torch.topk, (SCORES, 2), {"largest": False}), False),
        ((torch.topk, (SCORES.view(3, 2, 2), 2), {}), False),
        ((torch.sort, (SCORES,), {}), False),
    ],
)
def test_a_choice_of_experts_is_told_from_other_calls(call: Any, is_choice: bool) -> None:
    func, args, kwargs = call
    found = find_scores(func, args, kwargs, experts=4, top_k=2)
    assert found is SCORES if is_choice else found is None


LAYERS = RoutedLayers("Tiny", depth=4, layers=(1, 2, 3), experts=4, top_k=2)


def routes() -> Tensor:
    return torch.tensor(
        [
            [[0, 0], [0, 1], [3, 2], [1, 0]],
            [[0, 0], [2, 3], [1, 0], [3, 0]],
            [[0, 0], [0, 0], [0, 0], [0, 0]],
        ],
        dtype=torch.int16,
    )


def with_ids(row: int, layer: int, ids: list[int]) -> Tensor:
    given = routes()
    given[row, layer] = torch.tensor(ids)
    return given


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (routes()[0], r"shape \(4, 2\), but Tiny has 4 decoder layers and 2 experts"),
        (routes()[:, 1:], r"shape \(3, 3, 2\).*include dense layers"),
        (routes().transpose(0, 1), r"shape \(4, 3, 2\)"),
    ],
)
def test_other_shapes_are_refused(given: Tensor, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        check_shape(given, LAYERS)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (with_ids(1, 2, [0, 4]), r"layer 2 name experts \[0, 4\] in row 1, but Tiny has experts 0 to 3"),
        (with_ids(1, 1, [2, 2]), r"layer 1 name experts \[2, 2\] in row 1, which contain an expert"),
        (
            with_ids(2, 1, [2, 1]),
            r"layer 2 name experts \[0, 0\] in row 2, which contain an expert.*2 \(row, layer\) pairs",
        ),
        (routes()[:, [1, 0, 2, 3]], r"layer 1 name experts \[0, 0\] in row 0, which contain an expert"),
        (with_ids(0, 0, [2, 1]), r"layer 0 name experts \[2, 1\] in row 0, but layer\(s\) \[0\] of Tiny have no exp"),
    ],
)
def test_ids_that_no_router_chooses_are_refused(given: Tensor, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        check_ids(given, (given != 0).flatten(1).any(1), LAYERS)
