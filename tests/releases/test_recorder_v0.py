"""What the V0 trainer sends along for the recorder, on a real DataProto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipe.offpolicy.batch.plan import PLAN, REWARD, UID, UpdateRows
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording.run import RunRecord
from recipe.offpolicy.trainer.corrected_v0 import CorrectedV0, build_row_identity
from recipe.offpolicy.trainer.supervision import Supervision
from verl import DataProto
from verl_patches.legacy.handover import HANDOVER

UIDS = ["prompt-1", "prompt-1", "ü", "4f2c"]


class VerlsTrainer:
    """Stands in for RayPPOTrainer."""

    def _get_dp_size(self, worker_group: Any, role: str) -> int:
        return 2


def batch() -> DataProto:
    made = DataProto.from_dict(
        {
            "response_mask": torch.ones(4, 2, dtype=torch.int64),
            "token_level_scores": torch.tensor([[0.0, 1.0], [0.25, 0.5], [0.0, 0.0], [-1.0, 0.0]]),
        }
    )
    made.non_tensor_batch["uid"] = np.array(UIDS, dtype=object)
    return made


def trainer(directory: Path | None, legacy: bool) -> Any:
    verls: Any = VerlsTrainer()
    verls.config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"path": "model"},
                "actor": {"ppo_epochs": 1, "ppo_mini_batch_size": 2, "loss_agg_mode": "token-mean", "strategy": "fsdp"},
                "rollout": {"n": 1},
            },
            "offpolicy": {
                "allow_identical_log_probs": False,
                "allow_unrelated_log_probs": False,
                "record": {"dir": directory and str(directory)},
            },
            "trainer": {"default_local_dir": "checkpoints", "resume_mode": "disable"},
        }
    )
    verls.global_steps, verls.actor_rollout_wg = 7, None
    made: Any = CorrectedV0(verls)
    made.shadows, made._by_engine = {}, not legacy
    made.supervision = Supervision(CorrectionSpec(), made.config)
    made.recording = RunRecord(made.config, made.correction, {})
    return made


def test_the_legacy_actor_gets_uids_and_rewards_as_small_columns(tmp_path: Path) -> None:
    sent = trainer(tmp_path, legacy=True)._with_plan(batch())
    assert [bytes(row).rstrip(b"\0").decode() for row in sent.batch[UID].numpy()] == UIDS
    assert sent.batch[UID].shape == (4, 8)
    assert sent.batch[REWARD].tolist() == [1.0, 0.75, 0.0, -1.0]
    handover = sent.meta_info[HANDOVER]
    assert handover.record.dir == str(tmp_path)
    assert handover.plan.update == UpdateRows(ranks=2, rows=2, mini_batch_rows=1)
    # Each rank gets those of its own rows.
    assert [part.batch[REWARD].tolist() for part in sent.chunk(2)] == [[1.0, 0.75], [0.0, -1.0]]


def test_the_engine_gets_what_verl_sends_anyway(tmp_path: Path) -> None:
    sent = trainer(tmp_path, legacy=False)._with_plan(batch())
    assert {UID, REWARD} & set(sent.batch.keys()) == set()
    assert sent.meta_info[PLAN].update == UpdateRows(ranks=2, rows=2, mini_batch_rows=1)
    assert "uid" in sent.to_tensordict().keys()


@pytest.mark.parametrize("legacy", [False, True])
def test_without_a_directory_nothing_travels(legacy: bool) -> None:
    sent = trainer(None, legacy)._with_plan(batch())
    assert {UID, REWARD} & set(sent.batch.keys()) == set()
    plan = sent.meta_info[HANDOVER].plan if legacy else sent.meta_info[PLAN]
    assert plan.update is None


def test_the_columns_survive_a_column_of_one_letter() -> None:
    data = batch()
    data.non_tensor_batch["uid"] = np.array(list("abcd"), dtype=object)
    assert build_row_identity(data)[UID].tolist() == [[97], [98], [99], [100]]
