"""What corrections add to the batch that verl sends to its workers is counted, and contains no per-token column."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.batch.plan import PLAN
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.monitor.step_cost import count_bytes
from recipe.offpolicy.proof.rollout_log_probs import SameEngineError
from recipe.offpolicy.recording.run import RunRecord
from recipe.offpolicy.trainer.corrected_v0 import CorrectedV0
from recipe.offpolicy.trainer.supervision import Supervision
from recipe.offpolicy.worker.verl_workers import adopt
from tests.support.corrections import GSM, TIS, opsm
from tests.support.padded_rows import build_model_input
from verl import DataProto
from verl_patches.legacy.handover import HANDOVER

ROWS, WIDTH = 4, 37  # no other size of the batch is 37
COST = "offpolicy/cost"
VERLS = (
    *("responses", "response_mask", "old_log_probs", "rollout_log_probs", "advantages"),
    *("input_ids", "attention_mask", "position_ids"),
)
CORRECTIONS: dict[str, dict[str, Any]] = {
    "weight and masks": {"weight": TIS, "masks": {"gsm": GSM, "opsm": opsm(0.1)}},
    "kept tokens": {"masks": {"gsm": GSM}, "denominator": "kept"},
    "no forward pass": {"weight": TIS, "proximal": "reuse"},
}


class VerlsTrainer:
    """A stand-in for RayPPOTrainer: one forward pass for pi_old, and an update that reports nothing."""

    actor_rollout_wg: Any

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        return DataProto.from_dict({"old_log_probs": self.actor_rollout_wg.compute_log_prob(batch)}), 0.0

    def _update_actor(self, batch: DataProto) -> DataProto:
        output: DataProto = self.actor_rollout_wg.update_actor(batch)
        return output

    def update(self, batch: DataProto) -> DataProto:
        """Of the workers."""
        self.sent = batch
        return DataProto.from_single_dict(data={}, meta_info={"metrics": {}})

    def _get_dp_size(self, worker_group: Any, role: str) -> int:
        return 1


def configuration() -> DictConfig:
    actor = {"ppo_epochs": 1, "ppo_mini_batch_size": ROWS, "loss_agg_mode": "token-mean"}
    own = {"allow_identical_log_probs": False, "allow_unrelated_log_probs": False}
    return OmegaConf.create({"actor_rollout_ref": {"actor": actor, "rollout": {"n": 1}}, "offpolicy": own})


def trainer(correction: dict[str, Any], *, legacy: bool = False, apart: float = 0.01) -> Any:
    verls: Any = VerlsTrainer()
    verls.config, verls.global_steps = configuration(), 7
    made: Any = CorrectedV0(verls)
    made.supervision = Supervision(CorrectionSpec.from_mapping(correction), made.config)
    made.supervision.begin = lambda: None
    made.supervision.metrics = dict
    made.shadows, made.recording = {}, RunRecord(made.config, made.correction, {})
    log_probs = made.cost.counted(lambda data: data.batch["rollout_log_probs"] + apart * torch.randn(ROWS, WIDTH))
    made.supervision.collect = lambda metrics: False
    verls.actor_rollout_wg = SimpleNamespace(compute_log_prob=log_probs, update_actor=verls.update)
    adopt(verls.actor_rollout_wg, made._update_and_collect)
    made._by_engine = not legacy
    return verls


def batch() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(ROWS, WIDTH, generator=generator) - 1.2
    tokens = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)
    columns = {
        "responses": tokens,
        **build_model_input(tokens),
        "response_mask": torch.ones(ROWS, WIDTH, dtype=torch.int64),
        "old_log_probs": log_probs,
        "rollout_log_probs": log_probs + 0.1 * torch.randn(ROWS, WIDTH, generator=generator),
        "advantages": torch.ones(ROWS, WIDTH),
    }
    assert set(columns) == set(VERLS)
    made = DataProto.from_dict(columns)
    made.non_tensor_batch["uid"] = np.array(["prompt"] * ROWS, dtype=object)
    made.non_tensor_batch["min_global_steps"] = made.non_tensor_batch["max_global_steps"] = np.array([6] * ROWS)
    return made


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_nothing_of_a_token_each_is_added(name: str, legacy: bool) -> None:
    made = trainer(CORRECTIONS[name], legacy=legacy)
    metrics = made._update_actor(batch()).meta_info["metrics"]
    added = {key: column for key, column in made.sent.batch.items() if key not in VERLS}
    for key, column in added.items():
        assert len(column) == ROWS, key
        assert WIDTH not in column.shape, key
    assert set(VERLS) <= set(made.sent.batch.keys())
    handed = made.sent.meta_info[HANDOVER if legacy else PLAN]
    assert metrics[f"{COST}/added_bytes"] == sum(map(count_bytes, added.values())) + len(pickle.dumps(handed))
    # A single column of log-probs of this small batch is larger than all of it together for a plain plan.
    if not legacy:
        assert metrics[f"{COST}/added_bytes"] < 1200


@pytest.mark.parametrize(("proximal", "forwards"), [("recompute", 1.0), ("reuse", 0.0), ("bypass", 0.0)])
def test_forward_passes_are_counted_where_verl_makes_them(proximal: str, forwards: float) -> None:
    correction = {"weight": TIS | {"ratio": "full"}, "proximal": proximal}
    made = trainer(correction)
    for _ in range(2):  # a step begins again
        made._compute_old_log_prob(batch())
        # As verl computes the reference's log-probs with the actor's weights below an adapter.
        made.actor_rollout_wg.compute_log_prob(batch())
        metrics = made._update_actor(batch()).meta_info["metrics"]
        assert metrics[f"{COST}/proximal_forwards"] == forwards


@pytest.mark.parametrize("legacy", [False, True])
def test_one_engine_makes_the_forward_pass_of_its_first_step_alone(legacy: bool) -> None:
    """pi_old is mu in every step, and verl does not log that mu equals itself."""
    made = trainer({"proximal": "same_engine"}, legacy=legacy, apart=1e-8)
    for forwards in (1.0, 0.0, 0.0):
        rows = batch()
        old, _ = made._compute_old_log_prob(rows)
        assert torch.equal(old.batch["old_log_probs"], rows.batch["rollout_log_probs"])
        metrics = made._update_actor(rows).meta_info["metrics"]
        assert metrics[f"{COST}/proximal_forwards"] == forwards
        assert metrics["training/rollout_probs_diff_valid"] == 0.0


def test_two_engines_stop_before_the_first_update() -> None:
    made = trainer({"proximal": "same_engine"}, apart=0.01)
    with pytest.raises(SameEngineError, match=r"\|mu - pi_old\| is 0\.0\d+ nats at step 7, sequence \d \(uid prompt\)"):
        made._compute_old_log_prob(batch())
