"""The trainer receives the metrics of all mini-batches of an update, although verl gathers them one by one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import training_worker as tw
from tests.support.first_update import adapter
from tests.support.specs import STACK
from verl.workers.config import PolicyLossConfig


@pytest.mark.parametrize(("loss_mode", "entropy"), [("vanilla", True), ("gspo", False)])
def test_responses_padded_at_once_are_those_that_verl_pads(engine: Any, loss_mode: str, entropy: bool) -> None:
    from verl_patches import worker_seams

    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=0.2)
    found = {}
    for takes_padded in (True, False):
        loss = adapter(
            STACK, prove=False, policy_loss=PolicyLossConfig(loss_mode=loss_mode), entropy_coeff=0.1 if entropy else 0.0
        )
        loss.takes_padded = takes_padded
        found[takes_padded] = tw.gradients(
            engine, loss, rows.to_tensordict(), micro_batch_size=4, calculate_entropy=entropy
        )
    assert worker_seams.PADDING.in_force()
    (metrics, gradient), (metrics_of_verl, gradient_of_verl) = found[True], found[False]
    assert metrics["loss"] == metrics_of_verl["loss"]
    assert ("actor/entropy_loss" in metrics) == entropy
    assert tw.equal(gradient, gradient_of_verl)
