"""Agent loops' outputs are scored between sampling and reward, training rows alone, one call a row."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf

from recipe.offpolicy.extensions.process_reward.prefix_scorer import FIELD, TailScores
from tests.support.byte_tokenizer import build_byte_tokenizer

pytestmark = pytest.mark.verl("!=0.7.1")
llm_server = pytest.importorskip("verl.workers.rollout.llm_server")

VERSION = 3


class Output(SimpleNamespace):
    """verl's output of an agent loop."""


class Verls:
    """Stands in for verl's agent loop worker."""

    def __init__(self, config: Any, llm_client: Any) -> None:
        self.config, self.llm_client, self.tokenizer = config, llm_client, build_byte_tokenizer([])
        self.tokenizer.eos_token_id = 0
        self.rewarded: list[Any] = []

    async def _agent_loop_postprocess(self, output: Any, validate: Any, **kwargs: Any) -> Any:
        each = output if isinstance(output, list) else [output]
        self.rewarded += [FIELD in one.extra_fields for one in each]
        return output


class Client(llm_server.LLMServerClient if hasattr(llm_server, "LLMServerClient") else object):  # type: ignore[misc]
    """A client whose server scores at once."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.left: list[str] = []

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        return None

    async def _acquire_server(self, request_id: str, **extra: Any) -> Any:
        async def remote(row: list[int], tails: list[Any], read_cache: bool) -> TailScores:
            self.requests.append(request_id)
            return TailScores([-0.5] * len(tails), [VERSION] * len(tails), requests=len(tails))

        return "server", SimpleNamespace(score_tails=SimpleNamespace(remote=remote))

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self.left.append(server_id)


def worker() -> tuple[Any, Client]:
    from recipe.offpolicy.extensions.process_reward.manager import ScoringWorker

    config = OmegaConf.create({"process_reward": {"think_end": ""}, "actor_rollout_ref": {"rollout": {}}})
    client = Client()
    made: Any = type("Worker", (ScoringWorker, Verls), {})(config, client)
    return made, client


def output(**changed: Any) -> Any:
    given = {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 1], "multi_modal_data": {}}
    return Output(**(given | {"extra_fields": {"max_global_steps": VERSION}} | changed))


TRUTH = {"ground_truth": "7"}


async def sample_and_post(made: Any, found: Any, validate: bool = False, **kwargs: Any) -> None:
    """What verl does with a row: the agent loop samples it by the worker's client, and its output is posted."""
    await made.llm_client.generate("sampled", prompt_ids=[1], sampling_params={})
    await made._agent_loop_postprocess(found, validate, **kwargs)


def test_training_rows_are_scored_before_their_reward_on_the_replica_that_sampled_them() -> None:
    (made, client), found = worker(), output()
    asyncio.run(sample_and_post(made, found, reward_model=TRUTH))
    sent = found.extra_fields[FIELD]
    assert (sent["values"], sent["version"], sent["error"]) == ([-0.5, -0.5], VERSION, None)
    assert made.rewarded == [True]
    assert (client.requests, client.left) == (["sampled"], ["server"])


def test_validation_rows_are_never_scored() -> None:
    (made, client), found = worker(), output()
    asyncio.run(sample_and_post(made, found, validate=True, reward_model=TRUTH))
    assert (made.rewarded, client.requests) == ([False], [])


def test_rows_that_cannot_be_scored_say_why() -> None:
    (made, client), found = worker(), output(multi_modal_data={"images": [0]})
    asyncio.run(sample_and_post(made, found, reward_model=TRUTH))
    assert "images" in found.extra_fields[FIELD]["error"]
    asyncio.run(sample_and_post(made, found := output()))
    assert "reward_model.ground_truth" in found.extra_fields[FIELD]["error"]
    assert client.requests == []


def test_rows_that_run_at_once_keep_their_own_request() -> None:
    made, client = worker()

    async def row(name: str) -> None:
        await made.llm_client.generate(name, prompt_ids=[1], sampling_params={})
        await asyncio.sleep(0)
        await made._agent_loop_postprocess(output(), False, reward_model=TRUTH)

    async def both() -> None:
        await asyncio.gather(*(asyncio.create_task(row(name)) for name in ("one", "two")))

    asyncio.run(both())
    assert sorted(client.requests) == ["one", "two"]


@pytest.mark.verl("==0.9.1")
def test_managers_start_workers_that_score(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.extensions.process_reward import manager, manager_v1

    monkeypatch.setattr(ray, "remote", lambda found: found)
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {}, "model": {}}})
    for made, expected in (
        (manager.ScoringManagerV0(config, None), manager.ScoringWorkerV0),
        (manager_v1.ScoringManagerV1(config, None), manager_v1.ScoringWorkerV1),
    ):
        assert made.agent_loop_workers_class is expected
        assert expected._agent_loop_postprocess is manager.ScoringWorker._agent_loop_postprocess
