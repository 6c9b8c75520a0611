"""A batch of verl's V0 trainer in memory, advantages from verl's own estimators, and the workers' reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.correction import RolloutStage
from recipe.offpolicy.extensions.add_on import Extension
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.batch_view import LossRows
from recipe.offpolicy.trainer.batch_view import DataProtoBatch
from verl import DataProto
from verl.trainer.ppo import core_algos

WIDTH = 12
"""Width of a response."""

Rows = Sequence[tuple[str, int, float]]
"""(group, tokens, score) of each row; the group is also the prompt."""


def make_batch(
    rows: Rows,
    step: int = 1,
    decide: Callable[[DataProto], RolloutStage] | None = None,
    width: int = WIDTH,
    **columns: Sequence[Any],
) -> DataProtoBatch:
    """A batch whose scores are on the last token; responses have one more token, of a tool."""
    lengths = torch.tensor([tokens for _, tokens, _ in rows])
    there = torch.arange(width) < lengths[:, None]
    scores = torch.zeros(len(rows), width)
    scores[torch.arange(len(rows)), (lengths - 1).clamp(min=0)] = torch.tensor([score for _, _, score in rows])
    prompts = torch.tensor([[sum(map(ord, group)), 7] for group, _, _ in rows])
    responses = torch.arange(len(rows) * width).view(len(rows), width) % 50
    batch = DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "attention_mask": torch.cat([torch.ones_like(prompts), there.long()], -1),
            "response_mask": there.long(),
            "token_level_scores": scores,
        }
    )
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch.non_tensor_batch["uid"] = np.array([group for group, _, _ in rows], dtype=object)
    for name, values in columns.items():
        batch.non_tensor_batch[name] = np.array(values, dtype=object)
    return DataProtoBatch(batch, step, decide=decide)


def estimate(view: DataProtoBatch, name: str = "grpo", *, by_std: bool = True) -> Callable[[], None]:
    """Return verl's estimator, as the V0 trainer calls it."""

    def run() -> None:
        tensors, config = view.batch.batch, {"norm_adv_by_std_in_grpo": by_std}
        by_index: dict[str, Any] = {"index": np.array(view.uids, dtype=object)}
        if name == "grpo":
            by_index["norm_adv_by_std_in_grpo"] = by_std
        found = getattr(core_algos, f"compute_{name}_outcome_advantage")(
            tensors["token_level_rewards"].clone(), tensors["response_mask"].float(), **by_index, config=config
        )
        view.put_advantages(found[0], returns=True)

    return run


def shape(view: DataProtoBatch, *extensions: Extension, name: str = "grpo", by_std: bool = True) -> Tensor:
    """Return each row's advantage, (n,), after the hooks of these extensions."""
    AddOns(extensions).compute_advantages(view, estimate(view, name, by_std=by_std))
    return view.advantages[:, 0].double()


def report(view: DataProtoBatch, extension: Extension, change: Callable[[TensorDict], None] = lambda data: None) -> Any:
    """Return what the extension's worker reports for two micro-batches in another order."""
    names = ("responses", "response_mask", "advantages")
    data = TensorDict({name: view.batch.batch[name].clone() for name in names}, batch_size=len(view.batch))
    change(data)
    half = extension.worker()
    assert half is not None
    order = torch.arange(len(data)).flip(0)
    return [half.report(LossRows({}, data[part])) for part in order.tensor_split(2)]


def nest(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def make_queue_batch(
    monkeypatch: pytest.MonkeyPatch, store: dict[str, Any], keys: Sequence[str], step: int = 1, **options: Any
) -> Any:
    """A batch of verl's V1 trainer whose columns lie in ``store``; rows whose key begins with "pad" are padding."""
    pytest.importorskip("transfer_queue")
    from recipe.offpolicy.trainer.batch_view import TransferQueueBatch

    tags = [{"is_padding": True} if key.startswith("pad") else {} for key in keys]
    meta = SimpleNamespace(keys=list(keys), tags=tags, partition_id="")
    calls: dict[str, Callable[..., Any]] = {
        "kv_batch_get": lambda keys, partition_id, select_fields: {name: store[name] for name in select_fields},
        "kv_batch_put": lambda keys, partition_id, fields: (
            store.update({name: fields[name] for name in fields.keys()}) or meta
        ),
    }
    for name, call in calls.items():
        monkeypatch.setattr(f"transfer_queue.{name}", call)
    return TransferQueueBatch(meta, step, **options)
