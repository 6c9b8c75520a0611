"""Every quotient by a spread, range, count or mass is finite, bounded, 0 for noise, continuous, and never NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.extensions.length_penalty.penalties import compute_shift
from recipe.offpolicy.extensions.opd.signal import advantages as distil
from recipe.offpolicy.extensions.process_reward.utilities import normalize_utilities
from tests.support.examples import at_most

PENALTY = 0.05
"""Greatest distance of a penalty from its group's mean."""


class Normalisation(NamedTuple):
    """A function of a group's n values, the greatest size of its result, and whether it centres."""

    apply: Callable[[Tensor], Tensor]
    bound: Callable[[int], float]
    centred: bool = False


def of_utilities(normalize: str) -> Callable[[Tensor], Tensor]:
    def apply(values: Tensor) -> Tensor:
        row = values[None]
        return normalize_utilities(row, torch.ones_like(row, dtype=torch.bool), ["a"], normalize=normalize)[0]

    return apply


def of_gaps(values: Tensor) -> Tensor:
    on = torch.ones(1, len(values), dtype=torch.bool)
    zeros = torch.zeros(1, len(values), dtype=torch.float64)
    return -distil(zeros, values.double()[None], zeros, on, coef=1.0, max_gap=1e38, scale="std")[0]


def shift(scores: Tensor) -> Tensor:
    """Penalties that alternate about their mean."""
    penalty = torch.where(torch.arange(len(scores)) % 2 == 0, PENALTY, -PENALTY).double()
    return compute_shift(penalty, scores.double(), {"a": list(range(len(scores)))}, by_std=True)


SCALES = {
    "zscore": Normalisation(of_utilities("zscore"), lambda n: math.sqrt(max(n - 1, 0)), centred=True),
    "scale": Normalisation(of_utilities("scale"), math.sqrt),
    "distillation": Normalisation(of_gaps, math.sqrt),
    "shift": Normalisation(shift, lambda n: max(math.sqrt(max(n - 1, 0)), 2 * PENALTY)),
}

LARGEST = torch.finfo(torch.float32).max
sizes = st.sampled_from([1e-45, 1e-30, 1e-3, 1.0, 7.0, 1e5, 1e30, 3e38]).flatmap(
    lambda size: st.sampled_from([size, -size])
)
near = st.tuples(sizes, st.lists(st.integers(-3, 3), min_size=1, max_size=9), st.floats(0, 8)).map(
    lambda drawn: [max(-LARGEST, min(LARGEST, drawn[0] * (1 + step * 2.0**-23 * 10 ** drawn[2]))) for step in drawn[1]]
)
wild = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=9)
groups = (near | wild).map(lambda values: torch.tensor(values, dtype=torch.float32))


@pytest.mark.parametrize("name", SCALES)
@settings(max_examples=at_most(60))
@given(values=groups)
def test_finite_and_within_its_bound(name: str, values: Tensor) -> None:
    found = SCALES[name].apply(values)
    assert bool(torch.isfinite(found).all())
    assert float(found.abs().max()) <= SCALES[name].bound(len(values)) * (1 + 1e-6)


@given(sizes, st.lists(st.integers(-2, 2), min_size=2, max_size=9))
def test_values_that_agree_within_rounding_are_0_after_centring(size: float, steps: list[int]) -> None:
    values = torch.tensor([size * (1 + step * 2.0**-23) for step in steps], dtype=torch.float32)
    assert of_utilities("zscore")(values).tolist() == [0.0] * len(steps)
    alternating = [PENALTY if at % 2 == 0 else -PENALTY for at in range(len(steps))]
    middle = sum(alternating) / len(steps)
    assert shift(values).tolist() == pytest.approx([each - middle for each in alternating])


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("size", [1.0, pytest.param(0.0, marks=pytest.mark.extended)])
def test_no_jump_as_a_gap_closes(name: str, size: float) -> None:
    """One of four values is off by a gap that shrinks by 3 % per step and finally vanishes."""
    unit = size or 1.0
    gaps = [unit * 0.97**step for step in range(1300)] + [0.0]
    found = torch.stack([SCALES[name].apply(size + torch.tensor([gap, 0, 0, 0]).double()) for gap in gaps])
    assert float(found.diff(dim=0).abs().max()) <= 0.1 * SCALES[name].bound(4)
