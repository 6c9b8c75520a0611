"""Routes at another layer's or row's place, by hand and in a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from recipe.offpolicy.replay.expert_choice import ChoiceRecord, ReplayError
from recipe.offpolicy.replay.fsdp_engine import check_layer_order, check_row_order, compare_layers
from recipe.offpolicy.replay.routed_model import RoutedModel, install_replay
from tests.support.mixtures import LAYERS, TOKENS, build_mixture, draw_tokens


@dataclass
class Replayed:
    """A model that replays, and the routes of its own choice."""

    model: Any
    routed: RoutedModel
    own: Tensor

    def replay(self, routes: Tensor) -> dict[int, ChoiceRecord]:
        self.routed.arm(routes)
        self.model(input_ids=draw_tokens(), use_cache=False)
        return self.routed.get_records()


@pytest.fixture(scope="module")
def replayed() -> Replayed:
    model = build_mixture("Qwen3Moe")
    routed = install_replay(model)
    routed.record_own()
    model(input_ids=draw_tokens(), use_cache=False)
    return Replayed(model, routed, routed.stack_ids())


def test_routes_at_their_places_pass(replayed: Replayed) -> None:
    records = replayed.replay(replayed.own)
    assert compare_layers(records).diagonal().tolist() == [TOKENS] * LAYERS
    check_layer_order(records)
    check_row_order(records)


@pytest.mark.parametrize(
    ("order", "layer", "agrees"), [([1, 0, 2], 0, 1), ([0, 2, 1], 1, 2), ([2, 0, 1], 0, 1)], ids=str
)
def test_permuted_layers_are_refused_by_name(replayed: Replayed, order: list[int], layer: int, agrees: int) -> None:
    records = replayed.replay(replayed.own[:, order])
    with pytest.raises(ReplayError, match=f"layer {layer} chooses the experts that were shipped for layer {agrees} "):
        check_layer_order(records)


@pytest.mark.parametrize(("shift", "where"), [(1, "after"), (-1, "before")])
def test_a_shift_by_one_row_is_refused(replayed: Replayed, shift: int, where: str) -> None:
    records = replayed.replay(replayed.own.roll(shift, 0))
    with pytest.raises(ReplayError, match=f"the row {where} .* off by one row"):
        check_row_order(records)
