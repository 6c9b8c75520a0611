"""A micro-batch owns what the engine handed over, and makes from it what a loss is called with."""

from __future__ import annotations

from dataclasses import replace

import torch
from tensordict import TensorDict

from recipe.offpolicy.batch import micro_batch as mb
from recipe.offpolicy.batch.plan import PLAN, SharedPlan


def read() -> mb.MicroBatch:
    """Rows of two tokens and of one, as the legacy actors say them: padded."""
    mask = torch.tensor([[1, 1], [1, 0]])
    column = torch.zeros(2, 2)
    columns = dict.fromkeys(("old_log_probs", "advantages", mb.ROLLOUT_LOG_PROBS), column)
    data = TensorDict({"responses": mask, "response_mask": mask, **columns}, batch_size=2)
    return mb.read({"log_probs": torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)}, data)


def test_other_log_probs_are_restated_at_response_tokens_alone() -> None:
    moved = replace(read(), log_prob=torch.full((2, 2), -0.5)).restated()
    assert moved.model_output["log_probs"].tolist() == [[-0.5, -0.5], [-0.5, -4.0]]


def test_the_leaf_is_a_copy() -> None:
    batch = read()
    output, leaf = batch.leaf()
    output["log_probs"].sum().backward()
    assert leaf.grad is not None
    assert batch.model_output["log_probs"].grad is None


def test_numbers_are_spread_to_where_log_probs_stand() -> None:
    assert read().spread(torch.tensor([[1.0, 2.0], [3.0, 0.0]])).tolist() == [[1.0, 2.0], [3.0, 0.0]]


def test_a_plan_and_tensors_are_put_into_a_copy() -> None:
    batch, plan = read(), SharedPlan(3)
    changed = batch.data_with(plan, advantages=torch.ones(2, 2), old_log_probs=None)
    assert changed[PLAN] == plan
    assert changed["advantages"].sum() == 4
    assert "old_log_probs" not in changed.keys()
    assert PLAN not in batch.data.keys()
    assert batch.data["advantages"].sum() == 0


def test_detached_rows_keep_nothing_of_the_engine_alive() -> None:
    rows = read().detached()
    assert not rows.log_prob.requires_grad
    assert rows.model_output == {}
    assert not list(rows.data.keys())
