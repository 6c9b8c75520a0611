"""verl 0.7.1's legacy actor ignores bypass mode if each batch gets one gradient step, as `verl_keys` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import legacy_actor as la

pytestmark = pytest.mark.verl("==0.7.1")

REJECTION = {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}
ONE_STEP = {"ppo_mini_batch_size": len(la.LENGTHS)}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with la.process_group():
        yield


def bypassed(*, drift: float, **config: Any) -> la.Parameters:
    """Return the parameters after verl's own update with bypass mode in the worker's configuration; mu differs from
    pi_old by ``drift``.
    """
    from verl.workers.config import PolicyLossConfig

    batch = la.rollout()
    batch["rollout_log_probs"] = batch["old_log_probs"] + drift
    batch["old_log_probs"] = batch["rollout_log_probs"]  # what the trainer does in bypass mode
    loss = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=REJECTION)
    return la.moved(la.actor(policy_loss=loss, **config), la.proto(batch), patched=False)[0]


def test_mu_is_read_only_when_it_is_asked_for() -> None:
    """With a drift of half a nat per token, every row is out of bounds: with the key, nothing may move; without it,
    weights move.
    """
    start = la.parameters(la.model())
    near, far = (bypassed(drift=drift, **ONE_STEP) for drift in (0.0, 0.5))
    assert la.distance(near, far, start) == 0.0  # mu makes no difference at all

    asked = ONE_STEP | {"use_rollout_log_probs": True}
    near, far = (bypassed(drift=drift, **asked) for drift in (0.0, 0.5))
    assert la.distance(near, far, start) > 0.1
    assert all((far[name] == start[name]).all() for name in start)


def test_two_mini_batches_read_mu_as_well() -> None:
    two = {"ppo_mini_batch_size": len(la.LENGTHS) // 2}
    start = la.parameters(la.model())
    near, far = (bypassed(drift=drift, **two) for drift in (0.0, 0.5))
    assert la.distance(near, far, start) > 0.1
