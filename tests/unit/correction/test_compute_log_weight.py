"""Log weights before their bounds: a sum of log-ratios, or their mean."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.correction import WeightSpec
from recipe.offpolicy.correction.units import partition_units
from recipe.offpolicy.correction.weights import compute_log_weight
from tests.support.corrections import TIS

LOG_RATIO = torch.tensor([[0.2, 0.4, 0.0], [-0.3, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(("aggregate", "expected"), [("product", [0.6, -0.3]), ("geometric", [0.3, -0.3])])
def test_a_sequence_weighs_by_its_valid_tokens(aggregate: str, expected: list[float]) -> None:
    weight = WeightSpec.from_mapping(TIS | {"level": "sequence", "upper": 5.0, "aggregate": aggregate})
    found = compute_log_weight(weight, LOG_RATIO, partition_units("sequence", MASK, None))
    assert found.flatten().tolist() == pytest.approx(expected)
