"""Metrics of values, cost and advantages by hand."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.extensions.process_reward.prefix_scorer import RowValues
from recipe.offpolicy.extensions.process_reward.utilities import (
    build_utilities,
    compute_covered,
    compute_separation,
    summarize_advantages,
    summarize_cost,
    summarize_values,
)

ROWS = [
    RowValues(ends=[2, 4], values=[-1.5, -1.0, -0.5], requests=3, forward=30, cached=10, began=11.0, ended=13.0),
    RowValues(ends=[1], values=[-2.0, -3.0], requests=3, forward=20, rescored=1, began=12.0, ended=14.0),
    RowValues(error="why"),
]


def test_metrics_of_values() -> None:
    found = summarize_values(build_utilities(ROWS, torch.ones(3, 4)), torch.tensor([1.0, 0.0, 1.0]))
    assert (found["episodes/mean"], found["episodes/max"], found["unscored_rows"]) == (1.5, 2.0, 1.0)
    assert (found["value/first/mean"], found["value/first/passed"]) == (-1.75, -1.5)
    assert (found["value/last/passed"], found["value/last/failed"], found["value/separation"]) == (-0.5, -3.0, 1.0)
    assert found["utility/mean"] == pytest.approx(0.0)
    assert found["utility/positive_share"] == pytest.approx(2 / 3)


def test_separation_counts_pairs_and_halves_ties() -> None:
    values = torch.tensor([-1.0, -2.0, -2.0, -3.0])
    assert compute_separation(values, torch.tensor([True, True, False, False])) == (2 + 0.5 + 1) / 4
    assert math.isnan(compute_separation(values, torch.ones(4, dtype=torch.bool)))


def test_cost_is_the_time_in_which_anything_is_scored() -> None:
    found = summarize_cost(ROWS, began=8.0)
    assert (found["cost/seconds"], found["cost/share_of_rollout"]) == (3.0, 0.5)
    assert (found["cost/requests"], found["cost/forward_tokens"], found["cost/rescored"]) == (6.0, 50.0, 1.0)
    assert found["cost/cached_share"] == pytest.approx(10 / 60)
    assert math.isnan(summarize_cost(ROWS, None)["cost/share_of_rollout"])
    assert compute_covered([]) == 0.0


def test_the_share_of_the_process_part() -> None:
    mask = torch.tensor([[1, 1, 0]])
    found = summarize_advantages(torch.tensor([[1.0, -1.0, 9.0]]), torch.tensor([[3.0, 3.0, 9.0]]), mask)
    assert found["advantage/share"] == 0.75
    assert (found["advantage/outcome_std"], found["advantage/process_std"]) == (pytest.approx(math.sqrt(2)), 0.0)
