"""Routes of a model with four decoder layers, the first of them dense, and four experts, two a token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.replay.expert_choice import ReplayError, RoutedLayers, check_ids, check_shape, find_routed_rows

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


def test_a_row_that_is_zero_in_all_layers_has_no_routes() -> None:
    assert find_routed_rows(routes()).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (routes().float(), "routes are torch.float32"),
        (routes().bool(), "routes are torch.bool"),
        (routes()[0], r"shape \(4, 2\), but Tiny has 4 decoder layers and 2 experts"),
        (routes()[:, 1:], r"shape \(3, 3, 2\).*count dense layers too"),
        (routes()[..., :1], r"shape \(3, 4, 1\)"),
        (routes().transpose(0, 1), r"shape \(4, 3, 2\)"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(given: Tensor, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        check_shape(given, LAYERS)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (with_ids(1, 2, [0, 4]), r"layer 2 name experts \[0, 4\] in row 1, but Tiny has experts 0 to 3"),
        (with_ids(0, 3, [-1, 2]), r"layer 3 name experts \[-1, 2\] in row 0, but Tiny has experts 0 to 3"),
        (with_ids(1, 1, [2, 2]), r"layer 1 name experts \[2, 2\] in row 1, an expert twice"),
        (with_ids(2, 1, [2, 1]), r"layer 2 name experts \[0, 0\] in row 2, an expert twice.*2 \(row, layer\) pairs"),
        (routes()[:, [1, 0, 2, 3]], r"layer 1 name experts \[0, 0\] in row 0, an expert twice"),
        (with_ids(0, 0, [2, 1]), r"layer 0 name experts \[2, 1\] in row 0, but layer\(s\) \[0\] of Tiny have no exp"),
    ],
)
def test_ids_that_no_router_chooses_are_refused(given: Tensor, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        check_ids(given, find_routed_rows(given), LAYERS)
