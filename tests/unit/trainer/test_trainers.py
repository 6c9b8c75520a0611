"""What the V0 and V1 trainers read from a batch, and when V1 runs the forward pass for pi_old."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from recipe.offpolicy.batch.plan import REWARD, UID
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.proof.rollout_log_probs import SameEngineError
from recipe.offpolicy.trainer.corrected_v0 import build_row_identity
from recipe.offpolicy.trainer.supervision import Supervision
from tests.support.padded_rows import build_model_input
from verl import DataProto


@pytest.mark.parametrize("apart", [1e-7, 1e-3])
def test_one_engine_makes_the_forward_pass_of_its_first_step_alone(
    apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transfer_queue")
    module = import_module("recipe.offpolicy.trainer.corrected_v1")
    passes = 0

    class Verl:
        def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
            nonlocal passes
            passes += 1
            columns["old_log_probs"] = columns["rollout_log_probs"] + apart
            return batch

    def read(batch: Any, *names: str) -> TensorDict:
        found = {name: columns[name] for name in columns if name in (*names, "attention_mask")}
        return TensorDict(found, batch_size=[4])

    def put(batch: Any, **added: Any) -> Any:
        columns.update(added)
        return batch

    monkeypatch.setattr(module, "read_columns", read)
    monkeypatch.setattr(module, "put_columns", put)
    own = {"allow_identical_log_probs": False, "allow_unrelated_log_probs": False}
    config = OmegaConf.create({"actor_rollout_ref": {"actor": {"ppo_epochs": 1}}, "offpolicy": own})
    trainer: Any = Verl()
    trainer.config, trainer.global_steps = config, 3
    made = module.CorrectedV1(trainer)
    made.add_ons = AddOns()
    made.supervision = Supervision(CorrectionSpec.from_mapping({"proximal": "same_engine"}), config)
    batch = SimpleNamespace(keys=["a_0_0", "b_0_0", "c_0_0", "d_0_0"])
    for step in range(3):
        mu = -1.2 - torch.rand(4, 16, generator=torch.Generator().manual_seed(step))
        tokens = torch.arange(64).view(4, 16)
        mask = torch.ones(4, 16, dtype=torch.int64)
        columns: dict[str, Any] = {"responses": tokens, "response_mask": mask, "rollout_log_probs": mu}
        columns |= build_model_input(tokens)
        columns["uid"] = NonTensorStack(*"abcd")
        if apart > 1e-6:
            with pytest.raises(SameEngineError, match="at step 3"):
                trainer._compute_old_log_prob(batch, {})
            return
        trainer._compute_old_log_prob(batch, {})
        assert torch.equal(columns["old_log_probs"], mu)
        assert passes == 1


@pytest.mark.parametrize("as_tensordict", [False, True])
def test_a_row_has_the_version_that_its_server_said(as_tensordict: bool) -> None:
    """verl 0.8.0 leaves the ends empty if nothing resumes a request; without a version, it is that of the previous
    step.
    """
    import numpy as np

    from recipe.offpolicy.trainer.corrected_v0 import _versions
    from verl import DataProto

    ends = {"min_global_steps": [2, 3], "max_global_steps": [4, 3]}
    nothing = {end: [None, None] for end in ends}
    for columns, expected in (
        ({**ends, "global_steps": [4, 3]}, [[2, 4], [3, 3]]),
        ({**nothing, "global_steps": [5, 6]}, [[5, 5], [6, 6]]),
        ({**nothing, "global_steps": [None, 6]}, [[7, 7], [7, 7]]),
        (nothing, [[7, 7], [7, 7]]),
        ({}, [[7, 7], [7, 7]]),
    ):
        batch: Any = DataProto.from_dict({"response_mask": torch.ones(2, 3)})
        batch.non_tensor_batch.update({name: np.array(each, dtype=object) for name, each in columns.items()})
        if "global_steps" not in columns:
            batch.meta_info["global_steps"] = 8  # the trainer's, of the whole batch
        assert _versions(batch.to_tensordict() if as_tensordict else batch, 8).tolist() == expected


def test_uids_are_filled_up_with_zeros_and_rewards_summed() -> None:
    batch = DataProto.from_dict({"token_level_scores": torch.tensor([[0.5, 1.0], [0.0, -1.0]])})
    batch.non_tensor_batch["uid"] = np.array(["ab", "\u00fcb"], dtype=object)
    found = build_row_identity(batch)
    # UTF-8 has two bytes for the umlaut.
    assert found[UID].tolist() == [[97, 98, 0], [195, 188, 98]]
    assert found[REWARD].tolist() == [1.5, -1.0]
