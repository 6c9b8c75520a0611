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


def test_lengths_of_nested_rows() -> None:
    layout = Layout.of(packed())
    assert (layout.prompts.tolist(), layout.responses.tolist()) == ([1, 2], [2, 1])
    assert (layout.width, layout.tokens) == (2, 3)
    assert layout.absent.tolist() == [[False, False], [False, True]]


def test_lengths_of_padded_rows_are_the_attention_masks() -> None:
    # Prompts are padded on the left to two tokens, responses on the right to three.
    data = TensorDict(
        {
            "prompts": torch.zeros(2, 2),
            "responses": torch.zeros(2, 3),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]]),
        },
        batch_size=2,
    )
    layout = Layout.of(data)
    assert (layout.prompts.tolist(), layout.responses.tolist()) == ([1, 2], [2, 1])
    assert (layout.width, layout.tokens) == (3, None)


def test_a_models_output_is_read_one_token_early() -> None:
    # Row 0: prompt, response, response; row 1: prompt, prompt, response. The last of each row predicts nothing.
    said = torch.tensor([10.0, 11.0, -1.0, 20.0, 21.0, -1.0], requires_grad=True)
    found = Layout.of(packed()).responses_of(said)
    assert found.tolist() == [[10.0, 11.0], [21.0, 0.0]]
    found.sum().backward()
    assert said.grad is not None
    assert said.grad.tolist() == [1, 1, 0, 0, 1, 0]


def test_a_column_is_padded_with_zeros() -> None:
    layout = Layout.of(packed())
    assert layout.column(torch.tensor([1, 2, 3])).tolist() == [[1, 2], [3, 0]]
    assert pad_column(nested([1.0, 2.0], [3.0]), layout, "advantages").tolist() == [[1.0, 2.0], [3.0, 0.0]]


def test_a_padded_column_is_taken_as_it_is() -> None:
    column = torch.ones(2, 5)
    assert pad_column(column, Layout.of(packed()), "advantages") is column


def test_a_column_of_other_length_is_refused() -> None:
    with pytest.raises(ValueError, match="advantages in the micro-batch has 4 tokens but the responses have 3"):
        pad_column(nested([1.0, 2.0], [3.0, 4.0]), Layout.of(packed()), "advantages")
