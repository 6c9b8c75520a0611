"""Rows in both layouts: padded to one width, and packed end to end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction.row_layout import count_tokens_by_row, detect_layout, spread_over_tokens

PADDED = torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.bool)
# Rows of three tokens and of one, end to end.
PACKED = torch.nested.nested_tensor([torch.tensor([1, 0, 1]), torch.tensor([1])], layout=torch.jagged)


@pytest.mark.parametrize(("tokens", "counts"), [(PADDED, [2.0, 2.0]), (PACKED, [2.0, 1.0])])
def test_true_tokens_are_counted_by_row(tokens: Tensor, counts: list[float]) -> None:
    found = count_tokens_by_row(tokens)
    assert found.dtype == torch.float64
    assert found.tolist() == counts


def test_a_value_of_each_row_is_spread_over_its_tokens() -> None:
    by_row = torch.tensor([3, 5])
    assert spread_over_tokens(by_row, PADDED).tolist() == [[3, 3, 3], [5, 5, 5]]
    packed = spread_over_tokens(by_row, PACKED)
    assert [row.tolist() for row in packed.unbind()] == [[3, 3, 3], [5]]


def test_a_sum_by_row_is_a_column() -> None:
    assert detect_layout(mask=PADDED).sum(torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, 0.0]])).tolist() == [[7.0], [8.0]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": torch.ones(2, 3), "b": torch.ones(3, 2)}, "one shape"),
        ({"a": torch.ones(4)}, "one shape"),
        ({"a": PADDED, "b": PACKED}, "b are nested, a are not"),
    ],
)
def test_tensors_of_several_layouts_are_refused(given: dict[str, Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        detect_layout(**given)
