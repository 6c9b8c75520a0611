"""The V0 trainer's hooks around verl's own methods, on a real DataProto and with verl's own estimator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.batch.plan import MINI_BATCH_TOKENS, PLAN, PROVE, SCALE
from recipe.offpolicy.batch.weight_versions import VERSIONS
from recipe.offpolicy.correction import Reduction, Statistic
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.recording.run import RunRecord
from recipe.offpolicy.trainer.corrected_v0 import CorrectedV0
from recipe.offpolicy.trainer.supervision import Supervision
from recipe.offpolicy.worker.verl_workers import adopt
from tests.support.padded_rows import build_model_input
from tests.support.specs import GSM
from verl import DataProto
from verl_patches.legacy.handover import HANDOVER

ROWS, WIDTH = 4, 3
KEPT = Statistic(Reduction.MEAN, (0.0, 10.0))
REWARDS = [1.0, 0.0, 0.0, 5.0]
"""The last row is far off policy, so its siblings must be compared without its reward."""


class VerlsTrainer:
    """A stand-in for RayPPOTrainer, which keeps what it receives and whose update reports nothing."""

    config: Any
    global_steps: int
    actor_rollout_wg: Any

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        raise AssertionError("a forward pass of the trainer")

    def _update_actor(self, batch: DataProto) -> DataProto:
        output: DataProto = self.actor_rollout_wg.update_actor(batch)
        return output

    def update(self, batch: DataProto) -> DataProto:
        """Of the workers."""
        self.sent = batch
        return DataProto.from_single_dict(data={}, meta_info={"metrics": {}})

    def _get_dp_size(self, worker_group: Any, role: str) -> int:
        return 1

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / "actor"
        folder.mkdir(parents=True)
        (folder / "model.pt").touch()

    def _load_checkpoint(self) -> str:
        return "what verl returns"


def trainer(legacy: bool = False, **correction: Any) -> Any:
    from recipe.offpolicy.correction import CorrectionSpec

    verls: Any = VerlsTrainer()
    verls.config = configuration()
    verls.global_steps = 7
    made: Any = CorrectedV0(verls)
    made.shadows = {}
    made.supervision = Supervision(CorrectionSpec.from_mapping(correction), made.config)
    made.recording = RunRecord(made.config, made.correction, {})
    made.supervision._statistics = {"kl/k3": 0.0}
    made.supervision.begin = lambda: None
    made.supervision.collect = lambda metrics: False
    verls.actor_rollout_wg = SimpleNamespace(update_actor=verls.update)
    adopt(verls.actor_rollout_wg, made._update_and_collect)
    made._by_engine = not legacy
    return made


def configuration() -> DictConfig:
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"path": "model"},
                "actor": {"ppo_epochs": 1, "ppo_mini_batch_size": 2, "loss_agg_mode": "token-mean", "strategy": "fsdp"},
                "rollout": {"n": 1},
            },
            "offpolicy": {"allow_identical_log_probs": False, "allow_unrelated_log_probs": False},
        }
    )


def batch(**columns: Any) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(ROWS, WIDTH, generator=generator) - 1.2
    apart = torch.tensor([0.0, 0.01, -0.01, 1.0])[:, None]
    rewards = torch.zeros(ROWS, WIDTH)
    rewards[:, -1] = torch.tensor(REWARDS)
    made = DataProto.from_dict(
        {
            **build_model_input(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)),
            "responses": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH),
            "response_mask": torch.ones(ROWS, WIDTH, dtype=torch.int64),
            "old_log_probs": old,
            "rollout_log_probs": old + apart,
            "token_level_rewards": rewards,
            "token_level_scores": rewards,
        }
    )
    made.non_tensor_batch["uid"] = np.array(["prompt"] * ROWS, dtype=object)
    made.non_tensor_batch.update(columns)
    return made


def test_rejected_rows_leave_the_baseline_of_verls_estimator() -> None:
    from verl.trainer.ppo.ray_trainer import compute_advantage

    made, data = trainer(masks={"gsm": GSM}, baseline="exclude"), batch()
    data = made._around_advantage(compute_advantage, data, adv_estimator="grpo")
    left = torch.tensor(REWARDS[:3])
    expected = (left - left.mean()) / (left.std() + 1e-6)
    torch.testing.assert_close(data.batch["advantages"][:3, 0], expected)
    assert data.batch["advantages"][3].abs().max() == 0
    assert list(data.non_tensor_batch["uid"]) == ["prompt"] * ROWS
    metrics = made._update_actor(data).meta_info["metrics"]
    assert metrics["offpolicy/baseline/excluded_sequences"] == 1.0
    # The next step has to go through it again.
    with pytest.raises(LivenessError, match="baseline=exclude"):
        made._update_actor(data)


def test_without_a_forward_pass_mu_stands_in_for_pi_old() -> None:
    data = batch()
    old, mfu = trainer(masks={"gsm": GSM | {"ratio": "full"}}, proximal="bypass")._compute_old_log_prob(data)
    assert torch.equal(old.batch["old_log_probs"], data.batch["rollout_log_probs"])
    assert torch.isnan(old.batch["entropys"]).all()
    assert mfu == 0.0


@pytest.mark.parametrize("legacy", [False, True])
def test_plan_columns_and_versions_travel_with_the_batch(legacy: bool) -> None:
    made = trainer(legacy, masks={"gsm": GSM}, denominator="kept")
    spans = {f"{end}_global_steps": np.array([5, 5, 6, 6], dtype=object) for end in ("min", "max")}
    made._update_actor(batch(**spans))
    sent = made.trainer.sent
    # Two mini-batches of two rows: nothing is rejected in the first, one row of two in the second.
    assert sent.batch[MINI_BATCH_TOKENS].tolist() == [6, 6, 6, 6]
    assert sent.batch[SCALE].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert sent.batch[VERSIONS].tolist() == [[5, 5], [5, 5], [6, 6], [6, 6]]
    plan = sent.meta_info[HANDOVER].plan if legacy else sent.meta_info[PLAN]
    assert plan.step == 7
    if legacy:
        handover = sent.meta_info[HANDOVER]
        assert (handover.spec, handover.plan.prove) == (made.correction, True)
    assert sent.batch[PROVE].tolist().count(1) == 3  # 12 tokens are not enough


ESS = {"action": "fallback", "patience": 1, "fallback": {"options": ["safer"], "correction": {"masks": {"p": GSM}}}}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("fell_back", [False, True])
def test_a_resume_hands_over_what_was_in_force(legacy: bool, fell_back: bool, tmp_path: Path) -> None:
    """The fallback of an alarm that has fired, or the bounds that have moved, are handed over after a resume."""
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.monitor.alarm_settings import DEFAULTS
    from tests.support.histograms import histogram

    def made() -> Any:
        trainer_ = trainer(legacy, masks={"gsm": GSM})
        trainer_.config.trainer = {"default_local_dir": str(tmp_path), "resume_mode": "auto", "resume_from_path": None}
        trainer_.config.correction = {"masks": {"gsm": GSM}}
        trainer_.config.offpolicy.calibrate = {"target_kept": 0.9, "warmup": 0}
        trainer_.config.offpolicy.alarms = {name: {"action": "off"} for name in DEFAULTS} | {"ess": ESS}
        trainer_.supervision = Supervision(CorrectionSpec.from_mapping({"masks": {"gsm": GSM}}), trainer_.config)
        trainer_.handed = 0
        trainer_._hand_over_loss = lambda: setattr(trainer_, "handed", trainer_.handed + 1)
        return trainer_

    first, again = made(), made()
    rows = histogram(torch.full((10,), 0.5), torch.ones(10, dtype=torch.bool))
    ess = 0.1 if fell_back else 0.9
    first.supervision.active_correction.after_update(
        {"rollout_ratio/ess": ess}, {"gsm/distance": rows, "gsm/kept": KEPT}
    )
    first._save_checkpoint()
    assert again._load_checkpoint() == "what verl returns"
    assert again.handed == 1
    assert again.correction == first.correction != CorrectionSpec.from_mapping({"masks": {"gsm": GSM}})
    again.supervision._statistics = {"kl/k3": 0.0}
    again.supervision.begin = lambda: None
    again.supervision.collect = lambda metrics: False
    again._update_actor(batch())
    plan = again.trainer.sent.meta_info[HANDOVER].plan if legacy else again.trainer.sent.meta_info[PLAN]
    assert plan.bounds == first.supervision.active_correction.bounds
    assert set(plan.bounds) == (set() if fell_back else {"gsm"})
    if legacy:
        handover = again.trainer.sent.meta_info[HANDOVER]
        assert (handover.spec, set(handover.moving)) == (first.correction, set(plan.bounds))


def test_versions_that_verl_does_not_tell_are_those_of_the_step_before() -> None:
    made = trainer(masks={"gsm": GSM})
    made._update_actor(batch(min_global_steps=np.array([None] * ROWS), max_global_steps=np.array([None] * ROWS)))
    assert made.trainer.sent.batch[VERSIONS].tolist() == [[6, 6]] * ROWS  # step 7
    made._update_actor(batch())
    assert made.trainer.sent.batch[VERSIONS].tolist() == [[6, 6]] * ROWS
