"""Places of the responses in verl's nested and padded layouts."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.batch.padding import Layout, pad_column


def nested(*rows: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def packed() -> TensorDict:
    """A prompt of one token and one of two; responses of two tokens and of one."""
    return TensorDict({"prompts": nested([7], [7, 7]), "responses": nested([8, 9], [8])}, batch_size=2)


def test_a_column_of_other_length_is_refused() -> None:
    with pytest.raises(ValueError, match="advantages in the micro-batch has 4 tokens but the responses have 3"):
        pad_column(nested([1.0, 2.0], [3.0, 4.0]), Layout.of(packed()), "advantages")
