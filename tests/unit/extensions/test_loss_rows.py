"""A micro-batch as an extension sees it inside the loss."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.batch.micro_batch import WEIGHTS
from recipe.offpolicy.extensions.loss_rows import LossRows
from verl.utils import tensordict_utils as tu


def nested(*rows: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def rows(*, with_padding: bool = True, **columns: torch.Tensor) -> LossRows:
    """A row of two tokens, and one that verl added as padding; each has a prompt of one token."""
    given = {"prompts": nested([7], [7]), "responses": nested([8, 9], [8]), "response_mask": nested([1, 1], [0])}
    data = TensorDict({**given, **columns}, batch_size=2)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=4, global_batch_size=2)
    return LossRows({"log_probs": nested([-1.0, -2.0, 0.0], [-3.0, 0.0])}, data, with_padding=with_padding)


def test_columns_by_token_and_by_row_are_padded() -> None:
    seen = rows(offpolicy_teacher=nested([0.5, 0.25], [4.0]), offpolicy_score=torch.tensor([1.0, 2.0]))
    assert seen.log_prob.tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert seen.response_mask.tolist() == [[True, True], [False, False]]
    assert seen.column("offpolicy_teacher").tolist() == [[0.5, 0.25], [4.0, 0.0]]
    assert seen.column("offpolicy_score").tolist() == [1.0, 2.0]
    assert "offpolicy_score" in seen


def test_rows_of_padding_are_left_out_of_reports() -> None:
    seen = rows(with_padding=False, offpolicy_score=torch.tensor([1.0, 2.0]))
    assert seen.log_prob.tolist() == [[-1.0, -2.0]]
    assert seen.column("offpolicy_score").tolist() == [1.0]


def test_weights_are_ones_where_nothing_corrects() -> None:
    assert rows().weights.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert rows(**{WEIGHTS: torch.tensor([[2.0, 0.0], [1.0, 1.0]])}).weights.tolist() == [[2.0, 0.0], [1.0, 1.0]]


def test_the_mean_is_the_mini_batchs() -> None:
    config = SimpleNamespace(loss_agg_mode="token-mean", loss_scale_factor=None)
    # 1 + 2 over the 4 tokens of the mini-batch; padding does not count.
    assert rows().mean(torch.tensor([[1.0, 2.0], [9.0, 9.0]]), config).item() == pytest.approx(0.75)


def test_a_column_that_did_not_arrive() -> None:
    with pytest.raises(KeyError, match="offpolicy_teacher is not in the micro-batch"):
        rows().column("offpolicy_teacher")
