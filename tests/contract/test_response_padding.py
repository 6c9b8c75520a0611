"""verl's loss accepts padded responses, and pads all other responses itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from verl_patches import worker_seams


@pytest.fixture
def no_padding_2_padding() -> Any:
    worker_seams.accept_padded()
    worker_seams.accept_padded()  # once is enough
    from verl.workers.utils import losses

    return losses.no_padding_2_padding


def test_padded_ones_are_the_answer_and_others_are_verls_to_pad(no_padding_2_padding: Any) -> None:
    assert worker_seams.PADDING.in_force()
    padded = torch.ones(2, 3, requires_grad=True)
    assert no_padding_2_padding(worker_seams.Padded(padded), None) is padded
    # Two tokens of prompt and one of response, and the other way round.
    columns = {"prompts": torch.ones(2, 2), "responses": torch.ones(2, 2)}
    columns["attention_mask"] = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    data = TensorDict(columns, batch_size=2)
    # At each token what belongs to the one after it.
    rows = [torch.tensor([9.0, 1.0, 9.0]), torch.tensor([2.0, 3.0, 9.0])]
    found = no_padding_2_padding(torch.nested.as_nested_tensor(rows, layout=torch.jagged), data)
    assert found.tolist() == [[1.0, 0.0], [2.0, 3.0]]
