"""Units: which tokens of a row share a weight or a decision, and what turns and versions make of both."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.correction import turns
from recipe.offpolicy.correction.units import partition_units
from tests.support.corrections import tensor

# A partition of the valid tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_ids_of_any_integer_type_and_size(dtype: torch.dtype) -> None:
    """The least and greatest number of the type are names like others; so is the one that stands on padding."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[high, low, high, 0, low]], dtype=dtype)
    valid = torch.tensor([[True, True, False, True, True]])
    unit = partition_units("version", valid, ids)
    total = unit.total(tensor([[1.0, 10.0, 0.0, 100.0, 1000.0]]))
    assert total[unit.tokens > 0].tolist() == [1010.0, 100.0, 1.0]


# Turns from the response mask -------------------------------------------------------------------------------


def test_turns_are_the_runs_of_the_response_mask() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [0, 0, 1, 0, 1, 1, 0, 0], [1] * 8, [0] * 8])
    found = turns(mask)
    assert found.dtype is torch.int64
    seen = [[turn for turn, valid in zip(*row, strict=True) if valid] for row in zip(found.tolist(), mask, strict=True)]
    assert seen == [[0, 0, 1, 2, 2], [0, 1, 1], [0] * 8, []]
    assert (found >= 0).all()
