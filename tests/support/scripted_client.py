"""verl's clients of rollout servers, with a server whose answers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

KINDS = ["LLMServerClient", "FullyAsyncLLMServerClient", "versioned"]
PROMPT = [1, 2]


def serve(kind: str, add: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any]) -> Any:
    """Build verl's client with what ``add`` adds; ``answers`` are the fields of successive TokenOutputs."""
    from recipe.offpolicy.staleness.client import note_versions
    from verl.workers.rollout import llm_server
    from verl.workers.rollout.replica import TokenOutput

    rollout = SimpleNamespace(response_length=100, name="vllm", full_determinism=True)
    name = "FullyAsyncLLMServerClient" if kind == "versioned" else kind
    client = getattr(llm_server, name)(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    client = add(note_versions(client) if kind == "versioned" else client)
    pause, script = asyncio.sleep, iter(answers)
    # verl waits a second before it asks again.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pause(0))

    async def acquire(self: Any, request_id: str, **kwargs: Any) -> Any:
        async def remote(**kwargs: Any) -> Any:
            answer = dict(next(script))
            fields = {"global_steps": 3, **answer.pop("extra_fields", {})}
            return TokenOutput(log_probs=[0.0] * len(answer["token_ids"]), extra_fields=fields, **answer)

        return "server", SimpleNamespace(generate=SimpleNamespace(remote=remote))

    monkeypatch.setattr(type(client), "_acquire_server", acquire, raising=False)
    monkeypatch.setattr(type(client), "_release_server", lambda *args, **kwargs: None, raising=False)
    return client


def ask(client: Any, request: str = "a") -> Any:
    return asyncio.run(client.generate(request, prompt_ids=PROMPT, sampling_params={}))
