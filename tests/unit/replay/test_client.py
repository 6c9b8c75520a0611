"""The client that records routes, wrapped around verl's own clients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.batch.weight_versions import CHUNKS
from recipe.offpolicy.replay.batch_routes import NOTE, hash_routes
from recipe.offpolicy.replay.expert_choice import ReplayError
from tests.support.mixtures import draw_routes
from tests.support.scripted_client import KINDS, ask, serve

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl.workers.rollout.llm_server")


def answer(tokens: list[int], routes: Tensor | None, reason: str) -> dict[str, Any]:
    return {"token_ids": tokens, "routed_experts": None if routes is None else routes.numpy(), "stop_reason": reason}


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_verls_clients_notes_routes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.replay.routing_replay import note_routes

    routes = draw_routes(tokens=4).to(torch.uint8)
    output = ask(serve(kind, note_routes, monkeypatch, answer([5, 6, 7], routes, "completed")))
    assert torch.equal(torch.as_tensor(output.routed_experts), routes)
    assert output.extra_fields[NOTE] == [4, hash_routes(routes)]
    assert (CHUNKS in output.extra_fields) == (kind == "versioned")


def test_a_server_without_routes_and_another_client_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.replay.routing_replay import note_routes

    script = answer([], None, "aborted"), answer([5], None, "completed")
    client = serve("LLMServerClient", note_routes, monkeypatch, *script)
    assert NOTE not in ask(client).extra_fields
    with pytest.raises(ReplayError, match="returned tokens without their routes"):
        ask(client)
    with pytest.raises(ReplayError, match="the client of the rollout servers is SimpleNamespace"):
        note_routes(SimpleNamespace())
