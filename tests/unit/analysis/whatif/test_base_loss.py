"""The base loss's factor: PPO's ratio and where it clips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recipe.offpolicy.analysis.whatif.replay import RecordedLoss


def card(**actor: Any) -> dict[str, Any]:
    return {"config": {"actor_rollout_ref": {"actor": actor}}}


VANILLA = {"loss_mode": "vanilla"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, RecordedLoss()),
        ({"config": None}, RecordedLoss()),
        (card(clip_ratio=0.2), RecordedLoss()),
        (card(policy_loss=VANILLA, clip_ratio=0.2), RecordedLoss("vanilla", 0.2, 0.2)),
        (
            card(policy_loss=VANILLA, clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.28, clip_ratio_c=3),
            RecordedLoss("vanilla", 0.2, 0.28, 3.0),
        ),
        (card(policy_loss={"loss_mode": "gspo"}, clip_ratio=0.2), RecordedLoss("gspo")),
    ],
)
def test_what_a_card_says(given: dict[str, Any], expected: RecordedLoss) -> None:
    assert RecordedLoss.from_card(given) == expected


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 1.0, 1.0),
        (1.27, 1.0, 1.27),  # below 1 + 0.28
        (1.29, 1.0, 0.0),
        (1.29, -1.0, 1.29),  # PPO lets a token of negative advantage come back down
        (2.9, -1.0, 2.9),
        (3.1, -1.0, 0.0),  # but for the dual clip
        (0.81, -1.0, 0.81),
        (0.79, -1.0, 0.0),
        (0.79, 1.0, 0.79),
        (5.0, 0.0, 5.0),
    ],
)
def test_clips(ratio: float, advantage: float, expected: float) -> None:
    log_ratio, advantages = (torch.tensor([[value]], dtype=torch.float64) for value in (math.log(ratio), advantage))
    assert float(RecordedLoss("vanilla", 0.2, 0.28, 3.0).compute_factor(log_ratio, advantages)) == pytest.approx(
        expected
    )
    assert float(RecordedLoss("gspo").compute_factor(log_ratio, advantages)) == pytest.approx(ratio)
    assert float(RecordedLoss("gpg").compute_factor(log_ratio, advantages)) == 1.0


def test_the_clip_is_that_of_ppo() -> None:
    """Against the gradient that autograd takes of PPO's dual-clip loss."""
    log_ratio = torch.linspace(-2, 2, 41, dtype=torch.float64)
    for sign in (1.0, -1.0):
        advantages = torch.full_like(log_ratio, sign)
        leaf = log_ratio.clone().requires_grad_()
        ratio = leaf.exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * 3.0), loss)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        factor = RecordedLoss("vanilla", 0.2, 0.28, 3.0).compute_factor(log_ratio[None], advantages[None])[0]
        torch.testing.assert_close(factor * -advantages, gradient)


@pytest.mark.parametrize(("name", "words"), [("", "does not name"), ("gspo", "gspo"), ("vanilla", ""), ("gpg", "")])
def test_what_is_not_modelled_is_said(name: str, words: str) -> None:
    assert (words in RecordedLoss(name).note) if words else RecordedLoss(name).note == ""
