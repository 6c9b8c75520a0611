"""What a worker scores is sealed where it is computed, with the name of its later column."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.batch.seals import build_seals, key_of
from tests.support.packed import packed

RESPONSES = torch.tensor([[5, 6, 7], [8, 9, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOG_PROBS = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]])
PROMPT = 2


class Worker:
    """A stand-in for verl's worker: log-probs over prompt and response, where each token has that of the next one."""

    def __init__(self, forward_only: bool = False) -> None:
        self.engine_config = SimpleNamespace(forward_only=forward_only)

    def infer_batch(self, data: Any) -> Any:
        if not isinstance(data, TensorDict):
            return "by names of rows"
        data.pop("no_lora_adapter", None)
        shifted = torch.cat([torch.full((2, PROMPT - 1), 9.0), LOG_PROBS, torch.ones(2, 1)], dim=-1)
        return TensorDict({"log_probs": packed(shifted, [PROMPT + 3, PROMPT + 2])}, batch_size=2)


def batch(**flags: bool) -> TensorDict:
    attention = torch.cat([torch.ones(2, PROMPT, dtype=torch.int64), MASK], dim=-1)
    columns = {"prompts": torch.ones(2, PROMPT, dtype=torch.int64), "responses": RESPONSES, "attention_mask": attention}
    data = TensorDict({**columns, "response_mask": MASK}, batch_size=2)
    for name, value in flags.items():
        data.set_non_tensor(name, value)
    return data


@pytest.mark.parametrize(
    ("forward_only", "flags", "column"),
    [(False, {}, "old_log_probs"), (True, {}, "ref_log_prob"), (False, {"no_lora_adapter": True}, "ref_log_prob")],
)
def test_scores_are_sealed(
    monkeypatch: pytest.MonkeyPatch, forward_only: bool, flags: dict[str, bool], column: str
) -> None:
    from recipe.offpolicy.worker.verl_workers import seal_scores
    from verl.workers import engine_workers

    monkeypatch.setattr(engine_workers, "TrainingWorker", Worker)
    monkeypatch.setattr(Worker, "infer_batch", Worker.infer_batch)
    seal_scores()
    seal_scores()
    output = Worker(forward_only).infer_batch(batch(**flags))
    (seal,) = build_seals(RESPONSES, MASK, {column: LOG_PROBS}).values()
    assert {*output.keys()} == {"log_probs", key_of(column)}
    assert torch.equal(output[key_of(column)], seal)
    assert Worker().infer_batch("names") == "by names of rows"
