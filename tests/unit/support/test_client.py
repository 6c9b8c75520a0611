"""The client that notes supports, behind verl's own clients."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.support.token_supports import NOTE, SupportError, TokenSupports, read_note

pytestmark = pytest.mark.verl("==0.9.1")
llm_server = pytest.importorskip("verl.workers.rollout.llm_server")

if hasattr(llm_server, "FullyAsyncLLMServerClient"):
    from recipe.offpolicy.staleness.client import note_versions
    from recipe.offpolicy.support import support_replay as ours
    from verl.workers.rollout.replica import TokenOutput

PROMPT = [1, 2]
Attempt = tuple[list[int], TokenSupports | None, str]
"""Sampled tokens, supports and why it ended."""


def singles(*tokens: int) -> TokenSupports:
    return TokenSupports(np.ones(len(tokens), np.uint8), np.array(tokens, np.uint8), np.ones(len(tokens), np.float32))


def build(kind: str, full_determinism: bool = False) -> Any:
    rollout = SimpleNamespace(response_length=100, name="vllm", full_determinism=full_determinism)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    if kind == "versioned":
        return note_versions(llm_server.FullyAsyncLLMServerClient(config))
    return getattr(llm_server, kind)(config)


def serve(client: Any, monkeypatch: pytest.MonkeyPatch, *attempts: Attempt) -> Any:
    """The client with supports, on a server that answers by a script."""
    pause, script = asyncio.sleep, iter(attempts)
    # verl waits a second before it asks again.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pause(0))

    async def acquire(self: Any, request_id: str, **kwargs: Any) -> Any:
        async def remote(**kwargs: Any) -> Any:
            tokens, supports, reason = next(script)
            answer = {} if supports is None else {ours.ANSWER: supports}
            return TokenOutput(
                token_ids=tokens,
                log_probs=[0.0] * len(tokens),
                stop_reason=reason,
                extra_fields={"global_steps": 3, **answer},
            )

        return "server", SimpleNamespace(generate=SimpleNamespace(remote=remote))

    noting = ours.note_supports(client)
    monkeypatch.setattr(type(noting), "_acquire_server", acquire, raising=False)
    monkeypatch.setattr(type(noting), "_release_server", lambda *args, **kwargs: None, raising=False)
    return noting


def ask(client: Any, request: str = "a", prompt: list[int] = PROMPT) -> Any:
    return asyncio.run(client.generate(request, prompt_ids=prompt, sampling_params={}))


def read(output: Any) -> Any:
    return read_note(pickle.loads(pickle.dumps(output.extra_fields[NOTE])))


KINDS = ["LLMServerClient", "FullyAsyncLLMServerClient", "versioned"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_resumed_request_keeps_the_supports_of_its_attempts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = (([5, 6], singles(5, 6), "aborted"), ([], None, "aborted"), ([7], singles(7), "completed"))
    output = ask(serve(build(kind), monkeypatch, *attempts))
    assert read(output).list_places().tolist() == [2, 3, 4]
    assert read(output).supports.ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_of_rows_that_share_ids_are_noted_by_the_task(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows with one id, whose turns alternate: 5 and 8 are the first row's, 6 and 9 the second's."""
    turns = [([token], singles(token), "completed") for token in (5, 6, 8, 9)]
    client = serve(build(kind, full_determinism=True), monkeypatch, *turns)

    async def row(first: int) -> Any:
        one = await client.generate("det-0", prompt_ids=PROMPT, sampling_params={})
        await pause(0)
        await client.generate("det-0", prompt_ids=[*PROMPT, first, 7], sampling_params={})
        return one

    async def both() -> Any:
        return await asyncio.gather(row(5), row(6))

    pause = asyncio.sleep
    notes = [read(output) for output in asyncio.run(both())]
    assert [note.supports.ids.tolist() for note in notes] == [[5, 8], [6, 9]]
    assert notes[0].spans == notes[1].spans == ((2, 1), (4, 1))


def test_other_clients_are_refused() -> None:
    with pytest.raises(SupportError, match="is SimpleNamespace, but supports are recorded only for verl's own"):
        ours.note_supports(SimpleNamespace())  # type: ignore[arg-type]
