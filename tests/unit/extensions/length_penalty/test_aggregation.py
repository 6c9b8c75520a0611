"""What verl's loss_agg_mode makes of an advantage of 1 at rows of 4 and of 16 tokens: the pull of each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl.trainer.ppo.core_algos import agg_loss

LENGTHS, WIDTH = (4, 16), 20


@pytest.mark.parametrize(
    ("mode", "short", "long"),
    [
        ("token-mean", 1 / 20, 1 / 20),  # 1 / sum T
        ("seq-mean-token-sum", 1 / 2, 1 / 2),  # 1 / G
        ("seq-mean-token-mean", 1 / 8, 1 / 32),  # 1 / (G T)
        ("seq-mean-token-sum-norm", 1 / (2 * WIDTH), 1 / (2 * WIDTH)),  # 1 / (G c), c the width of the micro-batch
    ],
)
def test_gradient_of_a_token(mode: Any, short: float, long: float) -> None:
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).float()
    values = torch.ones(2, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(agg_loss(loss_mat=values, loss_mask=mask, loss_agg_mode=mode), values)
    torch.testing.assert_close(gradient[0], short * mask[0])
    torch.testing.assert_close(gradient[1], long * mask[1])
