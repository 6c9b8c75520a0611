"""What add-ons tell the workers goes with a batch, and not with rows of an extension's making."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from recipe.offpolicy.extensions.add_on import AddOn
from recipe.offpolicy.extensions.add_ons import AddOns

FLAG = {"flag": True}
ROW = [([5], [6, 7])]


class Flagging(AddOn):
    def batch_flags(self) -> dict[str, Any]:
        return FLAG


class Trainer:
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {}, "actor": {}}})
    global_steps = 1

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.actor_rollout_wg = SimpleNamespace(compute_log_prob=self.forward, _dispatch_info={"actor": [0]})

    def _get_dp_size(self, workers: Any, role: str) -> int:
        return 1

    def forward(self, batch: Any) -> None:
        self.told.append(batch.extra_info)

    def _compute_old_log_prob(self, batch: Any, metrics: Any = None) -> Any:
        from verl import DataProto

        self.told.append(dict(batch.extra_info if metrics is not None else batch.meta_info))
        return batch if metrics is not None else (DataProto.from_dict({"old_log_probs": torch.zeros(1, 2)}), 0.0)

    def _update_actor(self, batch: Any, metrics: Any = None) -> Any:
        self.told.append(dict(batch.extra_info if metrics is not None else batch.meta_info))
        return batch


def correct(kind: Any) -> tuple[Any, Any]:
    trainer = Trainer()
    run = kind(trainer)
    run.add_ons = AddOns(own=[Flagging()])
    run.supervision = SimpleNamespace(wants_sampled=False, takes_mu=False, begin=dict, metrics=dict)
    run._with_plan = lambda batch: batch
    return trainer, run


def test_on_v0() -> None:
    from recipe.offpolicy.trainer.corrected_v0 import CorrectedV0
    from verl import DataProto

    trainer, run = correct(CorrectedV0)
    columns = {"rollout_log_probs": torch.zeros(1, 2), "position_ids": torch.zeros(1, 3)}
    batch = DataProto.from_dict(columns, meta_info={"metrics": {}})
    trainer._compute_old_log_prob(batch)
    run._compute_log_probs(batch, ROW)
    trainer._update_actor(batch)
    assert [told.get("flag") for told in trainer.told] == [True, None, True]


@pytest.mark.verl("==0.9.1")
def test_on_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = pytest.importorskip("transfer_queue")
    from recipe.offpolicy.trainer import corrected_v1

    nested = torch.nested.as_nested_tensor([torch.zeros(3)], layout=torch.jagged)
    mask = torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged)
    columns = {"log_probs": nested, "response_mask": mask, "multi_modal_inputs": []}
    monkeypatch.setattr(corrected_v1, "read_columns", lambda batch, *names: columns)
    monkeypatch.setattr(corrected_v1, "build_nested", lambda rows, source: None)
    monkeypatch.setattr(corrected_v1, "response_from_nested", lambda values, mask: mask)
    monkeypatch.setattr(
        corrected_v1, "tq", SimpleNamespace(kv_batch_put=lambda **rows: None, kv_clear=lambda **rows: None)
    )
    trainer, run = correct(corrected_v1.CorrectedV1)
    batch = queue.KVBatchMeta(partition_id="train", keys=["a_0_0"], tags=[{}], extra_info={"temperature": 0.7})
    trainer._compute_old_log_prob(batch, {})
    run._compute_log_probs(batch, ROW)
    trainer._update_actor(batch, {})
    assert [told.get("flag") for told in trainer.told] == [True, None, True]
    assert [told["temperature"] for told in trainer.told] == [0.7, 1.0, 0.7]
