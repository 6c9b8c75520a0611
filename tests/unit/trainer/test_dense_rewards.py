"""Both trainers stop before an estimator that would sum per-token rewards."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.proof.rewards import DenseRewardError, RewardError
from verl import DataProto

SCORES = torch.tensor([[0.5, 0.0, 1.0], [0.0, 1.0, 0.0]])
"""The first row has a reward before its last token."""
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


class Verls:
    estimated = 0

    def _compute_advantage(self, batch: Any, metrics: Any) -> Any:
        Verls.estimated += 1
        return batch


def trainer(version: str, estimator: str) -> Any:
    module = import_module(f"recipe.offpolicy.trainer.corrected_{version}")
    trainer: Any = Verls()
    trainer.config = OmegaConf.create({"algorithm": {"adv_estimator": estimator, "gamma": 1.0, "lam": 1.0}})
    trainer.global_steps = 1
    made = {"v0": "CorrectedV0", "v1": "CorrectedV1"}[version]
    run = getattr(module, made)(trainer)
    run.supervision = SimpleNamespace(spec=CorrectionSpec(), wants_sampled=False, takes_mu=False)
    run.add_ons = AddOns()
    return run


def advantage(
    version: str, monkeypatch: pytest.MonkeyPatch, estimator: str = "rloo", rewards: Tensor | None = None
) -> int:
    """Return how often verl's estimator ran on the batch."""
    made = trainer(version, estimator)
    made.config.algorithm.use_kl_in_reward = rewards is not None
    Verls.estimated, with_kl = 0, SCORES if rewards is None else rewards
    if version == "v0":
        columns = {"token_level_scores": SCORES, "response_mask": MASK, "token_level_rewards": with_kl}
        batch = DataProto.from_dict(columns)
        batch.non_tensor_batch["uid"] = np.array(["a", "a"], dtype=object)
        batch.batch["advantages"] = torch.zeros(2, 3)
        made._around_advantage(lambda data: Verls()._compute_advantage(data, {}), batch)
        return Verls.estimated
    pytest.importorskip("transfer_queue")
    rows = [torch.ones(3), torch.ones(2)]
    nested = {
        "rm_scores": [SCORES[0], SCORES[1, :2]],
        "token_level_rewards": [with_kl[0], with_kl[1, :2]],
        "response_mask": [row.long() for row in rows],
        "advantages": rows,
    }
    columns = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in nested.items()}
    batch = SimpleNamespace(keys=["a_0_0", "a_1_0"], tags=[{}, {}], partition_id="train")
    monkeypatch.setattr(
        "transfer_queue.kv_batch_get",
        lambda keys, partition_id, select_fields: {name: columns[name] for name in select_fields},
    )
    monkeypatch.setattr("transfer_queue.kv_batch_put", lambda keys, partition_id, fields: batch)
    made._compute_advantage(batch, {})
    return Verls.estimated


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_a_reward_that_is_not_finite_stops_every_run(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCORES", torch.tensor([[0.0, 0.0, 1.0], [0.0, torch.nan, 0.0]]))
    with pytest.raises(RewardError, match=r"the reward of sequence 1 \(prompt a, step 1\) is nan"):
        advantage(version, monkeypatch)
    assert Verls.estimated == 0


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_a_kl_in_the_reward_that_is_not_finite_names_the_sequence(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its score is finite, but the reference's log-probs are not."""
    rewards = torch.tensor([[0.5, 0.0, 1.0], [0.0, torch.nan, 0.0]])
    with pytest.raises(RewardError, match=r"sequence 1 \(prompt a, step 1\) is nan\. The score is finite.*reference"):
        advantage(version, monkeypatch, "reinforce_plus_plus", rewards)
    assert advantage(version, monkeypatch, "reinforce_plus_plus", SCORES) == 1


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_a_reward_that_is_not_finite_stops_validation(version: str) -> None:
    made = trainer(version, "grpo")
    with pytest.raises(RewardError, match=r"sequence 1 \(prompt b, validation\) is inf"):
        made._val_metrics_update(["s", "s"], ["a", "b"], {"reward": [1.0, float("inf")]}, [])


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_rewards_by_token_stop_before_an_estimator_that_sums_them(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DenseRewardError, match=r"adv_estimator=rloo: .*0\.5 at token 0"):
        advantage(version, monkeypatch)
    assert Verls.estimated == 0
