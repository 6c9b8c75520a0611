"""Uids and rewards as columns, and the demands on verl's task runner."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl import DataProto

from recipe.offpolicy.batch.plan import REWARD, UID
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.trainer.supervised_run import SupervisedRun, demand_corrected, demand_trained
from recipe.offpolicy.trainer.trainer_v0 import build_row_identity


def test_uids_are_filled_up_with_zeros_and_rewards_summed() -> None:
    batch = DataProto.from_dict({"token_level_scores": torch.tensor([[0.5, 1.0], [0.0, -1.0]])})
    batch.non_tensor_batch["uid"] = np.array(["ab", "\u00fcb"], dtype=object)
    found = build_row_identity(batch)
    # UTF-8 has two bytes for the umlaut.
    assert found[UID].tolist() == [[97, 98, 0], [195, 188, 98]]
    assert found[REWARD].tolist() == [1.5, -1.0]


def test_another_trainer_than_ours_is_refused() -> None:
    with pytest.raises(LivenessError, match=r"builds builtins\.object, which would train without the correction"):
        demand_corrected(object())
    demand_corrected(object.__new__(SupervisedRun))


def test_a_run_that_trained_nothing_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SupervisedRun, "fits", 0)
    with pytest.raises(LivenessError, match="no trainer with the correction has run"):
        demand_trained()
    monkeypatch.setattr(SupervisedRun, "fits", 1)
    demand_trained()
