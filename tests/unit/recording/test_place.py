"""Which rank records what several ranks see."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from recipe.offpolicy.recording import worker_hook
from recipe.offpolicy.recording.worker_hook import Place, among, place


def test_a_process_alone_records() -> None:
    assert place(1) == Place(0, True)


def test_every_rank_with_rows_of_its_own_records() -> None:
    assert [among(rank, copies=1) for rank in range(3)] == [Place(0, True), Place(1, True), Place(2, True)]


def test_of_ranks_that_share_sequences_the_first_records() -> None:
    """verl's mesh is (data parallel, sequence parallel): with two copies, ranks 0 and 1 hold the same rows."""
    assert [among(rank, copies=2) for rank in range(4)] == [
        Place(0, True),
        Place(0, False),
        Place(1, True),
        Place(1, False),
    ]


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


def test_megatron_that_is_only_imported_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(model_parallel_is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    monkeypatch.setattr(worker_hook.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(worker_hook.dist, "get_rank", lambda: 5)
    monkeypatch.setattr(worker_hook.dist, "get_world_size", lambda: 8)
    assert place(4) == Place(2, False)
