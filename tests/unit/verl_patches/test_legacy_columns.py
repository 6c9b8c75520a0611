"""What is sent to verl's legacy actors with a batch, and the update to which it belongs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl import DataProto
from verl_patches.legacy.algorithms import carried, handover_of, running, update
from verl_patches.legacy.handover import HANDOVER


def batch(**columns: torch.Tensor) -> DataProto:
    return DataProto.from_dict({"responses": torch.zeros(2, 1), **columns})


def test_a_handover_that_reads_mu_needs_it_in_the_batch() -> None:
    assert handover_of(batch()) is None
    handover = SimpleNamespace(reads_rollout_log_probs=True)
    without, with_mu = batch(), batch(rollout_log_probs=torch.zeros(2, 1))
    without.meta_info[HANDOVER] = with_mu.meta_info[HANDOVER] = handover
    assert handover_of(with_mu) is handover
    with pytest.raises(KeyError, match="rollout_log_probs is not in the batch"):
        handover_of(without)


def test_our_columns_are_kept_whatever_the_actor_selects() -> None:
    data = batch(rollout_log_probs=torch.zeros(2, 1), other=torch.zeros(2))
    data.meta_info = {HANDOVER: "left behind", "temperature": 1.0}
    made = carried(data, offpolicy_scale=torch.ones(2))
    assert made.meta_info == {"temperature": 1.0}
    assert set(made.select(["responses"]).batch.keys()) == {"responses", "rollout_log_probs", "offpolicy_scale"}
    assert "offpolicy_scale" not in data.batch.keys()


def test_one_update_runs_at_a_time() -> None:
    current: Any = object()
    assert running() is None
    with update(current):
        assert running() is current
    assert running() is None
