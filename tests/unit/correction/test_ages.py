"""Masks on the age of the weights, and bounds that go by it: by hand, and what cannot be meant."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage
from tests.support.corrections import TIS, band, spec

STALE: dict[str, Any] = {"aggregate": "staleness", "level": "token", "upper": 4}
ONE = torch.ones(1, 1)


def keep(correction: CorrectionSpec, ages: list[list[int]] | list[int], *, log_ratio: Any = 0.0, **more: Any) -> Any:
    """What is kept of rows of two turns, whose log(pi_old / mu) is ``log_ratio``, under an advantage of 1."""
    staleness = torch.tensor(ages)
    shape = staleness.shape if staleness.dim() == 2 else (len(ages), 2)
    old = torch.as_tensor(log_ratio, dtype=torch.float64).expand(shape)
    advantages = more.pop("advantages", torch.ones(shape))
    stage = rollout_stage(
        correction,
        old_log_prob=old,
        rollout_log_prob=torch.zeros(shape).double(),
        response_mask=more.pop("mask", torch.ones(shape)),
        staleness=staleness,
        **more,
    )
    return step_stage(correction, stage, log_prob=old, advantages=advantages)


def test_a_bound_by_age_widens_in_log_space() -> None:
    """[1, 2] with 1.01: exp(2 log 1.01) is kept from age 1 on, and at age 0 only 1.01 is."""
    correction = spec(narrow=band(0.5, 1.01, level="token", aggregate="product", by_staleness=[1, 2]))
    twice = 2 * math.log(1.01)
    assert keep(correction, [[0, 1, 2, 1]], log_ratio=[[twice, twice, twice, twice + 1e-6]]).keep.tolist() == [
        [False, True, True, False]
    ]
    assert keep(correction, [[0, 1]], log_ratio=[[twice / 2, -2 * math.log(2)]]).keep.tolist() == [[True, True]]


def test_ages_that_are_not_known_are_not_guessed() -> None:
    for correction in (spec(stale=STALE), spec(TIS | {"by_staleness": [1.0, 2.0]})):
        with pytest.raises(ValueError, match="the age of the weights is needed but unknown"):
            rollout_stage(correction, old_log_prob=ONE, rollout_log_prob=ONE, response_mask=ONE)
