"""One router's choice, by hand: four experts, two of them chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.replay.expert_choice import ChoiceRecord, ReplayError, RouterSlot, equal_sets, find_scores

SCORES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.0, 0.2], [0.2, 0.3, 0.4, 0.1]])
OWN = [[1, 2], [0, 3], [2, 1]]


def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(scores, 2, dim=-1)
    return values, ids


def run(slot: RouterSlot, forward: Callable[[Tensor], Any] = choose) -> Any:
    return slot.run(forward, (SCORES,), {})


def new_slot() -> RouterSlot:
    return RouterSlot(layer=5, experts=4, top_k=2)


def get_record(slot: RouterSlot) -> ChoiceRecord:
    assert slot.record is not None
    return slot.record


def test_unarmed_it_leaves_the_router_alone() -> None:
    slot = new_slot()
    _, ids = run(slot)
    assert ids.tolist() == OWN
    assert slot.record is None
    assert not slot.is_armed


def test_given_ids_replace_the_choice_in_their_rows() -> None:
    slot = new_slot()
    slot.arm(torch.tensor([[3, 0], [9, 9], [1, 2]], dtype=torch.uint8), torch.tensor([True, False, True]))
    values, ids = run(slot)
    assert ids.tolist() == [[3, 0], [0, 3], [1, 2]]
    assert torch.equal(values, torch.tensor([[0.2, 0.1], [0.7, 0.2], [0.3, 0.4]]))
    record = get_record(slot)
    assert record.own.tolist() == OWN
    assert record.ids.tolist() == ids.tolist()
    # Row 2 was given its own choice in the other order; row 1 is not counted.
    assert (int(record.count_replayed()), int(record.count_equal())) == (2, 1)


def test_without_rows_all_are_replayed() -> None:
    slot = new_slot()
    slot.arm(torch.tensor([[3, 0], [1, 2], [1, 0]]))
    assert run(slot)[1].tolist() == [[3, 0], [1, 2], [1, 0]]


def test_own_choice_is_recorded_and_kept_when_disarmed() -> None:
    slot = new_slot()
    slot.arm()
    run(slot)
    slot.disarm()
    assert get_record(slot).ids.tolist() == OWN
    assert int(get_record(slot).count_replayed()) == 0
    slot.arm()
    assert slot.record is None


def test_gradients_reach_the_scores_at_the_given_ids() -> None:
    slot, scores = new_slot(), SCORES.clone().requires_grad_()
    slot.arm(torch.tensor([[3, 0], [1, 2], [1, 0]]))
    slot.run(choose, (scores,), {})[0].sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]]


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
        ((Tensor.topk, (SCORES, 2), {"dim": 1, "sorted": False}), True),
        ((torch.topk, (), {"input": SCORES, "k": 2, "dim": -1}), True),
        ((torch.topk, (SCORES, 2, 0), {}), False),
        ((torch.topk, (SCORES, 1), {}), False),
        ((torch.topk, (SCORES, 2), {"largest": False}), False),
        ((torch.topk, (SCORES[:, :3], 2), {}), False),
        ((torch.topk, (SCORES.view(3, 2, 2), 2), {}), False),
        ((torch.sort, (SCORES,), {}), False),
    ],
)
def test_a_choice_of_experts_is_told_from_other_calls(call: Any, is_choice: bool) -> None:
    func, args, kwargs = call
    found = find_scores(func, args, kwargs, experts=4, top_k=2)
    assert found is SCORES if is_choice else found is None


def test_sets_are_compared_without_order() -> None:
    given = torch.tensor([[3, 1, 0], [3, 1, 0], [2, 2, 1]])
    assert equal_sets(given, torch.tensor([[0, 3, 1], [0, 3, 2], [2, 1, 1]])).tolist() == [True, False, False]
