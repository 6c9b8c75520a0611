"""Uids and rewards as columns."""

from __future__ import annotations

import numpy as np
import torch

from recipe.offpolicy.batch.plan import REWARD, UID
from recipe.offpolicy.trainer.corrected_v0 import build_row_identity
from verl import DataProto


def test_uids_are_filled_up_with_zeros_and_rewards_summed() -> None:
    batch = DataProto.from_dict({"token_level_scores": torch.tensor([[0.5, 1.0], [0.0, -1.0]])})
    batch.non_tensor_batch["uid"] = np.array(["ab", "\u00fcb"], dtype=object)
    found = build_row_identity(batch)
    # UTF-8 has two bytes for the umlaut.
    assert found[UID].tolist() == [[97, 98, 0], [195, 188, 98]]
    assert found[REWARD].tolist() == [1.5, -1.0]
