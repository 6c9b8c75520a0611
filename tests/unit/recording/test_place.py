"""Which rank records what several ranks see."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from recipe.offpolicy.recording import worker_hook
from recipe.offpolicy.recording.worker_hook import Place, place


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
