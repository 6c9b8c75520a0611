"""Rows that a mask on age rejects: their rewards stay in the baseline of their group, their tokens leave the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict

from recipe.offpolicy.batch.plan import PLAN, SharedPlan
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.loss import OffPolicyLoss
from tests.support import training_worker as tw
from tests.support.corrections import spec
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

REWARDS = [1.0, 0.0, 5.0]
"""The last row is of older weights."""
STALE = spec(stale={"aggregate": "staleness", "level": "token", "upper": 1})


class Verls:
    """Stands in for verl's V1 trainer: its GRPO, over the groups that the batch has."""

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        rewards = torch.tensor(REWARDS)[:, None] * torch.tensor([0.0, 1.0])
        mask, uids = batch.rows["response_mask"], np.array(list(batch.rows["uid"]), dtype=object)
        batch.rows["advantages"], _ = get_adv_estimator_fn("grpo")(rewards, mask, index=uids)
        return batch


def rows() -> TensorDict:
    mask, log_probs = torch.ones(3, 2), torch.full((3, 2), -1.0)
    fields = [{"min_global_steps": version, "max_global_steps": version} for version in (6, 5, 2)]
    columns = {"responses": mask.long(), "response_mask": mask.long(), "old_log_probs": log_probs}
    columns |= {"prompts": torch.ones(3, 1).long(), "attention_mask": torch.ones(3, 3).long()}
    uids = NonTensorStack("a", "a", "a")
    made = {**columns, "rollout_log_probs": log_probs, "extra_fields": NonTensorStack(*fields), "uid": uids}
    return TensorDict(made, batch_size=3)


def estimate(correction: CorrectionSpec) -> TensorDict:
    pytest.importorskip("transfer_queue")
    from recipe.offpolicy.trainer.corrected_v1 import CorrectedV1

    trainer: Any = Verls()
    trainer.config, trainer.global_steps = OmegaConf.create({"algorithm": {}}), 7
    made: Any = CorrectedV1(trainer)
    made.supervision = SimpleNamespace(spec=correction)
    made._check_rewards = lambda view: None
    batch = SimpleNamespace(rows=rows(), tags=[{}] * 3)
    estimated: TensorDict = trainer._compute_advantage(batch, {}).rows
    return estimated


def test_a_stale_row_counts_in_the_baseline_and_not_in_the_loss() -> None:
    batch = estimate(STALE)
    rewards = torch.tensor(REWARDS)
    whole = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    torch.testing.assert_close(batch["advantages"][:, 0], whole)
    # verl's layout: flat over prompt and response, shifted left by one token.
    log_probs = torch.full((9,), -1.0, requires_grad=True)
    batch[PLAN] = NonTensorData(SharedPlan(7), batch_size=[3])
    for name, value in {"dp_size": 1, "batch_num_tokens": 6, "global_batch_size": 3}.items():
        batch[name] = NonTensorData(value, batch_size=[3])
    loss, _ = OffPolicyLoss(STALE, tw.actor_config())({"log_probs": log_probs * 1.0}, batch)
    loss.backward()
    assert log_probs.grad is not None
    # -A / 6 tokens for the fresh rows, with the stale row's reward in their mean; nothing for the stale row.
    expected = torch.where(torch.tensor([True, True, False]), -whole / 6, 0.0)
    torch.testing.assert_close(log_probs.grad.reshape(3, 3)[:, :2], expected[:, None].expand(3, 2))
