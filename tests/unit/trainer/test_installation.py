"""Columns of a batch in TransferQueue, and the logger's own handler."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.offpolicy.trainer import logging_setup
from recipe.offpolicy.trainer.logging_setup import set_up_logger


@pytest.mark.verl(">=0.9")
def test_columns_go_into_the_batch_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transfer_queue")
    from recipe.offpolicy.trainer import batch_view_v1

    stored: dict[str, Any] = {}
    meta = SimpleNamespace(keys=["a", "b"], partition_id="train")

    def put(keys: Any, partition_id: str, fields: Any) -> Any:
        stored.update(fields.items())
        return keys, partition_id

    monkeypatch.setattr(batch_view_v1.tq, "kv_batch_put", put)
    monkeypatch.setattr(
        batch_view_v1.tq, "kv_batch_get", lambda keys, partition_id, select_fields: [stored[n] for n in select_fields]
    )
    assert batch_view_v1.put_columns(meta, rewards=torch.tensor([[1.0], [2.0]])) == (["a", "b"], "train")
    (found,) = batch_view_v1.read_columns(meta, "rewards")
    assert found.tolist() == [[1.0], [2.0]]


def test_the_logger_gets_a_handler_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = logging.Logger("of the test")
    monkeypatch.setattr(logging_setup, "logger", fresh)
    monkeypatch.setattr(logging.getLogger("verl"), "handlers", [])
    set_up_logger()
    set_up_logger()
    assert len(fresh.handlers) == 1
