"""What reaches the trainer of an update of several mini-batches, whose metrics verl gathers one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.statistics import merge_all
from tests.support import training_worker as tw
from tests.support.specs import STACK


def our_loss(**changes: Any) -> Any:
    from recipe.offpolicy.worker.loss import OffPolicyLoss

    return OffPolicyLoss(CorrectionSpec.from_mapping(STACK), tw.actor_config(**changes))


def test_all_mini_batches_come_by_one_transfer(
    engine_factory: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe.offpolicy.worker import metrics as packets
    from tests.support.sampled_rows import compute_sampled_checksums

    fetched: list[int] = []

    def fetch(readings: Any) -> Any:
        fetched.append(len(readings))
        return original(readings)

    original = packets.fetch
    monkeypatch.setattr(packets, "fetch", fetch)
    worker = engine_factory()
    rows = tw.add_log_probs(worker, tw.make_rollout(), mismatch=0.2)
    data = rows.to_tensordict()
    for _ in range(2):  # the second update finds nothing of the first
        metrics = tw.update(worker, our_loss(), data, micro_batch_size=2, mini_batches=2)
        assert len(fetched) == 1
        arrived = packets.take_packets(metrics)
        assert len(arrived) == 4
        assert len(fetched) == 1
        fetched.clear()
        assert Counter(row for packet in arrived for row in packet.rows) == Counter(compute_sampled_checksums(data))
        merged = merge_all(packet.statistics for packet in arrived)
        assert merged["keep/token_share"].parts[1] == float(torch.cat(rows.response_mask).sum())


@pytest.mark.parametrize(("loss_mode", "entropy"), [("vanilla", True), ("gspo", False)])
def test_responses_padded_at_once_are_those_that_verl_pads(engine: Any, loss_mode: str, entropy: bool) -> None:
    from verl.workers.config import PolicyLossConfig
    from verl_patches import worker_seams

    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=0.2)
    found = {}
    for takes_padded in (True, False):
        loss = our_loss(policy_loss=PolicyLossConfig(loss_mode=loss_mode), entropy_coeff=0.1 if entropy else 0.0)
        loss.takes_padded = takes_padded
        found[takes_padded] = tw.gradients(
            engine, loss, rows.to_tensordict(), micro_batch_size=4, calculate_entropy=entropy
        )
    assert worker_seams.PADDING.in_force()
    (metrics, gradient), (metrics_of_verl, gradient_of_verl) = found[True], found[False]
    assert metrics["loss"] == metrics_of_verl["loss"]
    assert ("actor/entropy_loss" in metrics) == entropy
    assert tw.equal(gradient, gradient_of_verl)
