"""Forward passes and bytes that a step takes next to verl's own work."""

from __future__ import annotations

import pickle

import torch

from recipe.offpolicy.monitor.step_cost import StepCost, count_bytes


def counts(cost: StepCost) -> tuple[float, float]:
    found = cost.metrics()
    return found["offpolicy/cost/proximal_forwards"], found["offpolicy/cost/added_bytes"]


def test_forward_passes_count_within_the_computation_of_pi_old_alone() -> None:
    cost = StepCost()
    compute = cost.counted(lambda rows: rows + 1)
    assert compute(1) == 2  # the reference's
    with cost.of_pi_old():
        assert compute(2) == 3
        compute(3)
    compute(4)
    assert counts(cost) == (2.0, 0.0)
    cost.begin()
    assert counts(cost) == (0.0, 0.0)


def test_bytes_of_columns_and_of_what_is_pickled() -> None:
    cost, plan = StepCost(), {"step": 3}
    cost.add({"scale": torch.zeros(4, dtype=torch.float64)}, plan)
    assert counts(cost) == (0.0, 32.0 + len(pickle.dumps(plan)))
    cost.begin()
    # Three values of 4 bytes and three offsets of 8.
    column = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged)
    cost.add_columns({"rows": column})
    assert counts(cost) == (0.0, 36.0)
    assert count_bytes(column) == 36
