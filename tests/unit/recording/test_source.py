"""The recorded part of verl's micro-batch in the layouts of its trainers, and the rank that records it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from recipe.offpolicy.batch.plan import UID, SharedPlan, UpdateRows
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import worker_hook
from recipe.offpolicy.recording.run import RecordSettings
from recipe.offpolicy.recording.worker_hook import Place, place

ROWS, PROMPT, WIDTH = 3, 4, 2
PROMPTS = [[7], [5, 6, 8], []]
PADDED = torch.tensor([[0] * (PROMPT - len(ids)) + ids for ids in PROMPTS])
ATTENTION = torch.tensor([[0] * (PROMPT - len(ids)) + [1] * len(ids) + [1, 0] for ids in PROMPTS])


def batch(**columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=ROWS)


def nested(rows: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


LAYOUTS = {
    "V1": batch(prompts=nested(PROMPTS)),
    "V0": batch(prompts=PADDED, attention_mask=ATTENTION),
    "legacy": batch(input_ids=torch.cat([PADDED, torch.full((ROWS, WIDTH), 9)], -1), attention_mask=ATTENTION),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_of_every_layout(layout: str) -> None:
    found = worker_hook._prompts(LAYOUTS[layout], WIDTH)
    assert found is not None
    ids, lengths = found
    assert ids.tolist() == [7, 5, 6, 8]
    assert lengths.tolist() == [1, 3, 0]


def test_uids_as_verl_sends_them_and_as_we_do() -> None:
    assert worker_hook._uids(batch(uid=NonTensorStack("a", "b", "c"))) == ["a", "b", "c"]
    ours = torch.zeros(ROWS, 2, dtype=torch.uint8)
    assert worker_hook._uids(batch(uid=NonTensorStack("a", "b", "c"), **{UID: ours})) is not None
    assert torch.equal(torch.as_tensor(worker_hook._uids(batch(**{UID: ours}))), ours)
    assert worker_hook._uids(batch()) is None


@pytest.mark.parametrize("uid", [NonTensorStack("a", 1, "c"), NonTensorData(None, batch_size=ROWS)])
def test_uids_that_are_no_strings_are_an_error(uid: Any) -> None:
    with pytest.raises(TypeError, match=r"uid in the micro-batch is .*, but each row needs a string"):
        worker_hook._uids(batch(uid=uid))


def test_rewards_are_summed_over_the_row() -> None:
    for name, scores in (
        ("token_level_scores", torch.tensor([[0.0, 1.0], [0.5, 0.25], [0.0, 0.0]])),
        ("rm_scores", nested([[0.0, 1.0], [0.75], [0.0]], torch.float)),
    ):
        reward = worker_hook._reward(batch(**{name: scores}))
        assert reward.tolist() == [1.0, 0.75, 0.0]


def test_prompts_are_chosen_by_their_uid_alone() -> None:
    """A share of 0.3 of 2000 uids is 600 +- 20 (one standard deviation is sqrt(2000 0.3 0.7) = 20.5)."""
    uids = [f"prompt-{i}" for i in range(2000)]
    some = [uid for uid in uids if worker_hook.is_chosen(uid, 0.3)]
    assert 500 < len(some) < 700
    # A larger share has the smaller one in it.
    assert set(some) < {uid for uid in uids if worker_hook.is_chosen(uid, 0.6)}
    assert all(worker_hook.is_chosen(uid, 1.0) for uid in uids)


@pytest.mark.parametrize(
    "part",
    [
        "_seen",
    ],
)
def test_what_fails_in_the_training_thread_stops_the_recording_alone(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    """Two updates of 3 rows: the first fails and the second is not tried, so all 6 rows are counted as left out."""

    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of pinned memory")

    for name in ("_seen", "pack", "_chosen"):
        monkeypatch.setattr(worker_hook, name, fails if name == part else lambda *_: SimpleNamespace(uids=None))
    settings = RecordSettings.at(str(tmp_path / "rec"))
    found = []
    for step in (1, 2):
        plan = SharedPlan(step, update=UpdateRows(ranks=1, rows=ROWS, mini_batch_rows=ROWS))
        batch_of: Any = SimpleNamespace(
            plan=plan, response_mask=torch.ones(ROWS, WIDTH, dtype=torch.bool), data=batch()
        )
        decided: Any = SimpleNamespace(rejected={})
        found.append(worker_hook.record(settings, CorrectionSpec(), batch_of, decided))
    values = [{name: statistic.value() for name, statistic in each.items()} for each in found]
    assert [each["record/dropped_rows"] for each in values] == [ROWS, ROWS]
    assert [each["record/stopped"] for each in values] == [1.0, 1.0]
    (entry,) = warnings.records
    assert entry.getMessage() == (
        f"offpolicy.record.dir={tmp_path / 'rec'}: rank 0 cannot record (RuntimeError: CUDA error: out of pinned "
        f"memory). Fix: set offpolicy.record.dir=null to turn recording off. Recording stops, and training continues."
    )
    assert entry.exc_info is not None
    assert entry.exc_info[2] is not None


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("context", [0, 1])
def test_megatron_knows_its_ranks(monkeypatch: pytest.MonkeyPatch, tensor: int, context: int) -> None:
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_rank=lambda: tensor,
        get_context_parallel_rank=lambda: context,
        get_data_parallel_rank=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    monkeypatch.setattr(worker_hook.dist, "is_initialized", lambda: True)
    assert place(4) == Place(3, tensor == context == 0)
