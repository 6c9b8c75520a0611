"""Masks by token, by divergence and by the batch, and stacks of them: by hand, up to the bound itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.corrections import M2PO, band, kept, run, spec, tensor

# Divergences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k2", "k3", "tv"])
def test_a_divergence_at_its_bound(kind: str) -> None:
    """Exact in every dtype: (1/2)^2 / 2 = 1/8. Of the others, the value that the ratio e^0.5 gives in float32."""
    value = {"k2": 0.125, "k3": math.exp(0.5) - 1.5, "tv": (math.exp(0.5) - 1) / 2}[kind]
    at = float(np.float32(value))
    for upper, expected in ((at, True), (float(np.nextafter(np.float32(at), np.float32(0))), False)):
        mask = band(None, upper, aggregate=f"{kind}_mean")
        assert kept(run(spec(m=mask), mu=[[0.0, 0.0]], old=[[0.5, 0.5]])) == [expected]


# Second moment ----------------------------------------------------------------------------------------------


def budget_of(budget: float, rows: list[list[float]], mask: Any = None) -> list[list[bool]]:
    m2po = spec(m=M2PO | {"budget": budget})
    return run(m2po, mu=torch.zeros_like(tensor(rows)), old=rows, mask=mask).keep.tolist()


def test_m2po_drops_equals_together() -> None:
    """Squares 0, 1/4 and 1/4: one of them alone would leave 1/8 in a budget of 0.15, both leave 1/6."""
    assert budget_of(0.15, [[0.0, 0.5, -0.5]]) == [[True, False, False]]
    assert budget_of(0.17, [[0.0, 0.5, -0.5]]) == [[True, True, True]]
    assert budget_of(0.25, [[0.5, -0.5], [0.5, 0.5]]) == [[True, True], [True, True]]
    assert budget_of(0.24, [[0.5, -0.5], [0.5, 0.5]]) == [[False, False], [False, False]]
