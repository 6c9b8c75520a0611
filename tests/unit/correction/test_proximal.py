"""Where pi_old comes from: four answers by hand, and what the corrections make of each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction import (
    proximal_log_prob,
)
from tests.support.corrections import tensor

MU, OLD, PI = tensor([[-1.0, -2.0]]), tensor([[-1.5, -2.25]]), tensor([[-2.0, -1.0]])


def of(proximal: str, alpha: float | None = None) -> Tensor:
    return proximal_log_prob(proximal, alpha, old_log_prob=OLD, rollout_log_prob=MU, log_prob=PI)  # type: ignore[arg-type]


def test_by_hand() -> None:
    assert torch.equal(of("recompute"), OLD)
    assert torch.equal(of("bypass"), MU)
    assert torch.equal(of("reuse"), PI)
    assert torch.equal(of("same_engine"), MU)
    # 0.75 x -1 + 0.25 x -2 = -1.25, and 0.75 x -2 + 0.25 x -1 = -1.75
    assert of("loglinear", 0.25).tolist() == [[-1.25, -1.75]]
    assert of("loglinear", 0.5).tolist() == [[-1.5, -1.5]]


def test_the_share_by_age_is_that_of_areal() -> None:
    """Its code has v_theta in force and v_prox = v_theta - 1: (v_prox - v_mu) / (v_theta - v_mu) = (a - 1) / a.

    From log mu = -1 to log pi = -2, and from -2 to -1.
    """
    policies = dict(old_log_prob=OLD, rollout_log_prob=MU, log_prob=PI)
    by_token = proximal_log_prob("loglinear", "by_age", ages=torch.tensor([[2, 4]]), **policies)
    assert by_token.tolist() == [[-1.5, -1.25]]
    line = dict(old_log_prob=OLD, rollout_log_prob=torch.zeros(1, 5), log_prob=torch.ones(1, 5))
    shares = proximal_log_prob("loglinear", "by_age", ages=torch.arange(5)[None], **line)
    assert shares[0].tolist() == pytest.approx([0, 0, 1 / 2, 2 / 3, 3 / 4])
    for age in (0, 1):
        assert torch.equal(proximal_log_prob("loglinear", "by_age", ages=torch.tensor([age]), **policies), MU)
    with pytest.raises(ValueError, match="the batch does not contain the versions"):
        proximal_log_prob("loglinear", "by_age", **policies)
