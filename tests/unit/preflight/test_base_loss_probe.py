"""The probe of verl's policy losses accepts losses that weight each token's term, and gives a reason for rejecting
others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipe.offpolicy.preflight.checks.base_loss import probe
from tests.support.training_worker import actor_config
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss
from verl.workers.config import PolicyLossConfig

WEIGHTED = "not w times its gradient without weights"
SPLIT = "changes with the split into micro-batches"
IGNORED = "ignores the weights"


def config(loss_mode: str = "vanilla", **changes: Any) -> Any:
    return actor_config(policy_loss=PolicyLossConfig(loss_mode=loss_mode), **changes)


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "cispo", "gpg", "dppo_tv", "dppo_kl", "sapo"])
def test_losses_that_take_a_weight(loss_mode: str) -> None:
    assert probe(config(loss_mode)) is None


@pytest.mark.parametrize(("loss_mode", "reason"), [("geo_mean", WEIGHTED), ("bypass_mode", IGNORED), ("kl_cov", SPLIT)])
def test_losses_that_do_not(loss_mode: str, reason: str) -> None:
    wrong = probe(config(loss_mode))
    assert reason in wrong


def test_the_answer_does_not_depend_on_the_random_state() -> None:
    """clip_cov picks tokens at random, so no two of its gradients can be compared."""
    for seed in range(3):
        torch.manual_seed(seed)
        assert probe(config("clip_cov")) is not None
        assert probe(config("vanilla")) is None


def test_sums_need_a_scale_that_is_not_the_micro_batch() -> None:
    """Without a scale, verl divides by the padded width, which differs between splits."""
    wrong = probe(config(loss_agg_mode="seq-mean-token-sum-norm"))
    assert SPLIT in wrong
    assert probe(config(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=64)) is None


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Any:
    """A policy loss of the test in verl's registry; the parameter says what it does with the weights."""
    what = request.param

    @register_policy_loss("of_the_test")
    def loss(
        old_log_prob: Any,
        log_prob: Any,
        advantages: Any,
        response_mask: Any,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Any = None,
    ) -> Any:
        term = -advantages * torch.exp(log_prob - old_log_prob)
        scale = config.global_batch_info
        if what == "applies":
            term = term * rollout_is_weights
        elif what == "squares":
            term = term * rollout_is_weights.square()
        elif what == "clamps":
            term = term * rollout_is_weights.clamp(max=1.0)
        elif what == "averages":
            term = term * rollout_is_weights.mean(-1, keepdim=True)
        elif what == "normalises by the kept":
            response_mask = response_mask * (rollout_is_weights > 0)
            term = term * rollout_is_weights
            scale = {**scale, "batch_num_tokens": response_mask.sum()}
        elif what == "means over micro-batches":
            term, scale = term * rollout_is_weights, {}
        return agg_loss(loss_mat=term, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **scale), {}

    yield what
    del POLICY_LOSS_REGISTRY["of_the_test"]


@pytest.mark.parametrize(
    ("registered", "reason"),
    [
        ("applies", ""),
        ("ignores", IGNORED),
        ("squares", WEIGHTED),
        ("clamps", WEIGHTED),
        ("averages", WEIGHTED),
        ("normalises by the kept", WEIGHTED),
        ("means over micro-batches", SPLIT),
    ],
    indirect=["registered"],
)
def test_a_loss_of_the_users_own(registered: str, reason: str) -> None:
    wrong = probe(config("of_the_test"))
    assert (wrong is None) is (reason == "")
    assert reason in (wrong or "")
