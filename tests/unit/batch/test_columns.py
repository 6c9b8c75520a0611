"""Columns of a batch in TransferQueue: put, read, and zeroed by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.growth import count_work

pytestmark = pytest.mark.verl(">=0.9")
pytest.importorskip("transfer_queue")


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_columns_go_into_the_batch_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.batch.padding import put_columns, read_columns

    stored: dict[str, Any] = {}
    meta = SimpleNamespace(keys=["a", "b"], partition_id="train")

    def put(keys: Any, partition_id: str, fields: Any) -> Any:
        stored.update(fields.items())
        return keys, partition_id

    def get(keys: Any, partition_id: str, select_fields: list[str]) -> Any:
        return [stored[name] for name in select_fields]

    monkeypatch.setattr("transfer_queue.kv_batch_put", put)
    monkeypatch.setattr("transfer_queue.kv_batch_get", get)
    assert put_columns(meta, rewards=torch.tensor([[1.0], [2.0]])) == (["a", "b"], "train")
    (found,) = read_columns(meta, "rewards")
    assert found.tolist() == [[1.0], [2.0]]


def test_rows_are_zeroed_in_a_copy() -> None:
    from recipe.offpolicy.batch.padding import zero_rows

    column = nested([torch.ones(2), torch.ones(1)])
    assert [row.tolist() for row in zero_rows(column, [True, False]).unbind()] == [[0.0, 0.0], [1.0]]
    assert column.values().tolist() == [1.0, 1.0, 1.0]

    def work(rows: int) -> int:
        many = nested([torch.ones(2)] * rows)
        return count_work(lambda: zero_rows(many, [True, False] * (rows // 2))).operations

    assert work(64) == work(8)
