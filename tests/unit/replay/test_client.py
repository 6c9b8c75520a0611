"""The client that notes routes, behind verl's own clients."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.replay.batch_routes import NOTE, hash_routes
from recipe.offpolicy.replay.expert_choice import ReplayError
from tests.support.mixtures import draw_routes

pytestmark = pytest.mark.verl("==0.9.1")
llm_server = pytest.importorskip("verl.workers.rollout.llm_server")

if hasattr(llm_server, "FullyAsyncLLMServerClient"):
    from recipe.offpolicy.replay import routing_replay as ours
    from recipe.offpolicy.staleness.client import note_versions
    from verl.workers.rollout.replica import TokenOutput

PROMPT = [1, 2]
Attempt = tuple[list[int], Tensor | None, str]
"""Sampled tokens, routes and why it ended."""


def build(kind: str, full_determinism: bool = False) -> Any:
    rollout = SimpleNamespace(response_length=100, name="vllm", full_determinism=full_determinism)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    if kind == "versioned":
        return note_versions(llm_server.FullyAsyncLLMServerClient(config))
    return getattr(llm_server, kind)(config)


def serve(client: Any, monkeypatch: pytest.MonkeyPatch, *attempts: Attempt) -> Any:
    """The client with routes, on a server that answers by a script."""
    pause, script = asyncio.sleep, iter(attempts)
    # verl waits a second before it asks again.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pause(0))

    async def acquire(self: Any, request_id: str, **kwargs: Any) -> Any:
        async def remote(**kwargs: Any) -> Any:
            tokens, routes, reason = next(script)
            routed = None if routes is None else routes.numpy()
            return TokenOutput(
                token_ids=tokens,
                log_probs=[0.0] * len(tokens),
                routed_experts=routed,
                stop_reason=reason,
                extra_fields={"global_steps": 3},
            )

        return "server", SimpleNamespace(generate=SimpleNamespace(remote=remote))

    routed = ours.note_routes(client)
    monkeypatch.setattr(type(routed), "_acquire_server", acquire, raising=False)
    monkeypatch.setattr(type(routed), "_release_server", lambda *args, **kwargs: None, raising=False)
    return routed


def ask(client: Any, request: str = "a", prompt: list[int] = PROMPT) -> Any:
    return asyncio.run(client.generate(request, prompt_ids=prompt, sampling_params={}))


@pytest.mark.parametrize("kind", ["LLMServerClient", "FullyAsyncLLMServerClient", "versioned"])
def test_each_of_verls_clients_notes_routes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    routes = draw_routes(tokens=4).to(torch.uint8)
    client = serve(build(kind), monkeypatch, ([5, 6, 7], routes, "completed"))
    output = ask(client)
    assert torch.equal(torch.as_tensor(output.routed_experts), routes)
    assert output.extra_fields[NOTE] == [4, hash_routes(routes)]


def test_a_server_without_routes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(build("LLMServerClient"), monkeypatch, ([], None, "aborted"), ([5], None, "completed"))
    assert NOTE not in ask(client).extra_fields
    with pytest.raises(ReplayError, match="returned tokens without their routes"):
        ask(client)


def test_another_client_is_refused() -> None:
    with pytest.raises(ReplayError, match="the client of the rollout servers is SimpleNamespace"):
        ours.note_routes(SimpleNamespace())
