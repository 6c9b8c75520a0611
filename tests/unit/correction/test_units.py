"""Units: which tokens of a row share a weight or a decision, and what turns and versions make of both."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.correction import turns
from recipe.offpolicy.correction.units import partition_units
from tests.support.corrections import TIS, run, spec, tensor

LOG = math.log


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


def test_a_token_without_mu_does_not_end_a_turn() -> None:
    """Turns follow the response mask: without mu the middle token is no factor, but 2 x 3 are still of one turn."""
    mask = torch.ones(1, 3)
    rows = dict(mu=[[0.0, math.nan, 0.0]], old=[[LOG(2), 0.0, LOG(3)]], turns=turns(mask))
    step = run(spec(TIS | {"level": "turn", "upper": None}), **rows)
    assert step.weight.tolist() == [pytest.approx([6.0, 0.0, 6.0], rel=1e-6)]
