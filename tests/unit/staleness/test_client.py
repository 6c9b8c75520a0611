"""The client that records versions per token, wrapped around verl's own resume loop and tool agent."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.scripted_client import PROMPT, ask, serve

pytestmark = pytest.mark.verl("==0.9.1")
llm_server = pytest.importorskip("verl.workers.rollout.llm_server")

if hasattr(llm_server, "FullyAsyncLLMServerClient"):
    from recipe.offpolicy.batch.seals import SealError
    from recipe.offpolicy.batch.weight_versions import CHUNKS, UNKNOWN, check_chunks
    from recipe.offpolicy.staleness import client as ours


def config() -> Any:
    rollout = SimpleNamespace(response_length=100, name="vllm", full_determinism=False)
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))


def versioned(monkeypatch: pytest.MonkeyPatch, *attempts: tuple[int, int, str]) -> Any:
    """Give the versioned client on a server that answers by a script: tokens, version and why the attempt ended."""
    answers = [
        {"token_ids": list(range(tokens)), "stop_reason": reason, "extra_fields": {"global_steps": version}}
        for tokens, version, reason in attempts
    ]
    return serve("versioned", lambda client: client, monkeypatch, *answers)


def test_each_attempt_notes_its_version_and_one_without_tokens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [(2, 3, "aborted"), (0, 3, "aborted"), (3, 4, "aborted"), (5, 6, "completed")]
    client = versioned(monkeypatch, *attempts, (0, 3, "aborted"), (1, 4, "completed"))
    output = ask(client, "a")
    assert output.extra_fields[CHUNKS] == [[(3, 2), (4, 3), (6, 5)]]
    assert len(output.token_ids) == 10
    # verl's own note of the row counts the attempt that was aborted before its first token.
    empty = ask(client, "b")
    assert empty.extra_fields["min_global_steps"] == 3
    assert empty.extra_fields[CHUNKS] == [[(4, 1)]]


def test_the_trainer_accepts_the_chunks_of_a_row_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change keeps the row's oldest and newest version, and the number of tokens in each of its turns."""
    attempts = [(2, 3, "aborted"), (2, 4, "completed"), (1, 4, "aborted"), (4, 6, "completed")]
    client = versioned(monkeypatch, *attempts)

    async def row() -> Any:
        turns = [await client.generate("a", prompt_ids=PROMPT, sampling_params={}) for _ in range(2)]
        return json.loads(json.dumps(dict(turns[0].extra_fields)))  # as it comes out of a queue

    fields = asyncio.run(row())
    assert fields[CHUNKS] == [[[3, 2], [4, 2]], [[4, 1], [6, 4]]]
    check_chunks([fields, {}, {CHUNKS: [[(3, 2)]]}])
    for turns in (
        [[[3, 1], [4, 3]], [[4, 1], [6, 4]]],
        [[[4, 2], [3, 2]], [[4, 1], [6, 4]]],
        [[[3, 2], [4, 2]], [[5, 1], [6, 4]]],
        [[[3, 2], [4, 2]]],
        None,
    ):
        with pytest.raises(SealError, match="the tokens of sequence 1 changed between the client"):
            check_chunks([fields, {**fields, CHUNKS: turns}])


def test_tokens_that_nobody_noted_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three attempts bypasses ``Attempts``."""
    noted, calls = ours.Attempts.generate, iter([True, False, True])

    async def drop(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await (
            noted(self, *args, **kwargs) if next(calls) else super(ours.Attempts, self).generate(*args, **kwargs)
        )

    monkeypatch.setattr(ours.Attempts, "generate", drop)
    client = versioned(monkeypatch, (2, 3, "aborted"), (3, 4, "aborted"), (5, 6, "completed"))
    assert ask(client).extra_fields[CHUNKS] == [[(3, 2), (6, 5), (UNKNOWN, 3)]]


def test_another_client_is_left_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    class Own(llm_server.FullyAsyncLLMServerClient):  # type: ignore[misc, name-defined]
        """A user's."""

    client = Own(config())
    with caplog.at_level(logging.WARNING):
        assert ours.note_versions(client) is client
    assert "is Own, so versions of the weights are known only per sequence" in caplog.text


def test_the_client_keeps_what_verl_gave_it_and_can_be_sent() -> None:
    client = llm_server.FullyAsyncLLMServerClient(config(), load_balancer_handle="handle", only_hybrid=True)
    made: Any = pickle.loads(pickle.dumps(ours.note_versions(client)))
    assert type(made) is ours.NotingResumingClient
    assert vars(made) == vars(client) | {"noters": (ours._add_versions,), "shares_ids": False}


@pytest.mark.parametrize(("mode", "noted"), [("sync", False), ("separate_async", True), ("colocate_async", True)])
def test_asynchronous_trainers_alone_note_versions(mode: str, noted: bool) -> None:
    from omegaconf import OmegaConf

    from recipe.offpolicy.trainer.corrected_v1 import CorrectedV1
    from verl.trainer.ppo.v1 import get_trainer_cls

    trainer: Any = object.__new__(get_trainer_cls(mode))
    CorrectedV1(trainer)
    made = OmegaConf.create({"trainer": {"use_v1": True, "v1": {"trainer_mode": mode}}})
    made.actor_rollout_ref = {"actor": {"strategy": "fsdp"}}
    trainer.config = made
    manager = SimpleNamespace(get_client=lambda client_cls=llm_server.LLMServerClient: client_cls(config()))
    trainer.llm_server_manager = trainer.standalone_server_manager = manager
    client = trainer.get_llm_client()
    assert type(client) is (ours.NotingResumingClient if noted else llm_server.LLMServerClient)
