"""Agent loops' outputs are scored between sampling and reward, checked by rollouts, and served by vLLM."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from omegaconf import OmegaConf

from recipe.offpolicy.extensions.process_reward.manager import choose_prefix, continue_prefix
from recipe.offpolicy.extensions.process_reward.prefix_scorer import FIELD, TailScores
from recipe.offpolicy.extensions.process_reward.settings import MonteCarloSettings
from recipe.offpolicy.extensions.process_reward.utilities import compute_rank_correlation
from tests.support.byte_tokenizer import build_byte_tokenizer

pytestmark = pytest.mark.verl("!=0.7.1")

llm_server = pytest.importorskip("verl.workers.rollout.llm_server")

VERSION = 3


class Output(SimpleNamespace):
    """verl's output of an agent loop."""


class Verls:
    """A stand-in for verl's agent loop worker."""

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
    """Do what verl does with a row: the agent loop samples it with the worker's client, and its output is posted."""
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


# Monte-Carlo values of prefixes


async def sample(ids: list[int], most: int, seed: int) -> list[int]:
    return [seed % 2] * most


async def reward(response: list[int]) -> float:
    return float(sum(response) >= 3)


def test_the_estimate_is_the_mean_reward_of_rollouts_from_the_prefix() -> None:
    """Seeds are drawn from the source: an even seed continues [1] with zeros, an odd seed with ones."""
    found = asyncio.run(continue_prefix([7], [1], 4, sample, reward, samples=400, source=random.Random(0)))
    assert found["mean"] == pytest.approx(0.5, abs=0.1)
    assert found["tokens"] == 400 * 3


def test_without_room_or_with_lost_rollouts_there_is_no_estimate() -> None:
    async def lose(ids: list[int], most: int, seed: int) -> None:
        return None

    async def fail(response: list[int]) -> float:
        return math.nan

    for prefix, take, score, said in (
        ([1] * 4, sample, reward, "maximum response length"),
        ([1], sample, fail, "the reward of a continuation is not finite."),
        ([1], lose, reward, "2 of 2 continuations were aborted"),
    ):
        found = asyncio.run(continue_prefix([7], prefix, 4, take, score, samples=2, source=random.Random(0)))
        assert said in found["error"]


def test_a_check_takes_its_share_of_the_rows_of_every_nth_version() -> None:
    settings = MonteCarloSettings(3, 0.25, 8)
    rows = [[row, row + 1, row + 2] for row in range(4000)]
    chosen = [choose_prefix(settings, 6, row, [1, 3]) for row in rows]
    assert sum(each is not None for each in chosen) / len(rows) == pytest.approx(0.25, abs=0.03)
    numbers = [each[0] for each in chosen if each is not None]
    assert [numbers.count(number) / len(numbers) for number in range(3)] == pytest.approx([1 / 3] * 3, abs=0.06)
    for version in (1, 7, None):
        assert choose_prefix(settings, version, rows[0], [1]) is None
    assert choose_prefix(MonteCarloSettings(None, 1.0, 8), 6, rows[0], [1]) is None


def test_rank_correlation_by_hand() -> None:
    """Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5."""
    one, other = torch.tensor([-3.0, -1.0, -1.0, -0.5]), torch.tensor([0.0, 0.1, 0.2, 1.0])
    assert compute_rank_correlation(one, other) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert compute_rank_correlation(one, -other) == pytest.approx(-4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(compute_rank_correlation(one, torch.ones(4)))
    assert math.isnan(compute_rank_correlation(one[:0], other[:0]))


class Policy:
    """A policy that answers each request with one token, using the weights of ``version``."""

    def __init__(self, version: int = VERSION, stop: str = "completed") -> None:
        self.asked: list[Any] = []
        self.version, self.stop = version, stop

    async def generate(self, request_id: str, **given: Any) -> Any:
        self.asked.append(given)
        fields = {"min_global_steps": self.version, "max_global_steps": self.version}
        return SimpleNamespace(token_ids=[5], stop_reason=self.stop, extra_fields=fields)


def post(policy: Policy, **changed: Any) -> Any:
    made, client = worker()
    client.generate = policy.generate  # type: ignore[method-assign]
    made.config.actor_rollout_ref.rollout = {"temperature": 0.9, "top_p": 1.0, "top_k": -1, "response_length": 4}
    made._settings = replace(made._settings, monte_carlo=MonteCarloSettings(VERSION, 1.0, 3))
    made.rewarded_rows = []

    async def score(outputs: list[Any], kwargs: Any) -> None:
        made.rewarded_rows.append((outputs[0].response_ids, FIELD in outputs[0].extra_fields))
        outputs[0].reward_score = 0.5

    made._compute_score = score
    found = output(reward_score=None, response_logprobs=[0.0, 0.0], metrics=SimpleNamespace(), **changed)
    asyncio.run(sample_and_post(made, found, reward_model=TRUTH))
    return made, found


@pytest.mark.verl("!=0.7.1")
def test_the_agent_loop_continues_a_prefix_with_the_same_weights_and_verls_reward() -> None:
    made, found = post(policy := Policy())
    result = found.extra_fields[FIELD]["monte_carlo"]
    ends = [0, *found.extra_fields[FIELD]["ends"]]
    prefix = [2, 3][: ends[result["number"]]]
    assert result == {"number": result["number"], "mean": 0.5, "tokens": 3}
    (_, *asked) = policy.asked  # the first sampled the row itself
    assert [each["prompt_ids"] for each in asked] == [[1, *prefix]] * 3
    assert len({each["sampling_params"]["seed"] for each in asked}) == 3
    assert {each["sampling_params"]["max_tokens"] for each in asked} == {4 - len(prefix)}
    assert made.rewarded_rows == [([*prefix, 5], False)] * 3
    assert (found.response_ids, found.reward_score, found.response_logprobs) == ([2, 3], None, [0.0, 0.0])


@pytest.mark.verl("!=0.7.1")
@pytest.mark.parametrize(
    ("policy", "changed"),
    [(Policy(VERSION + 1), {}), (Policy(stop="aborted"), {}), (Policy(), {"response_mask": [1, 0]})],
)
def test_other_weights_aborts_and_tool_tokens_give_no_estimate(policy: Policy, changed: dict[str, Any]) -> None:
    _, found = post(policy, **changed)
    result = found.extra_fields[FIELD].get("monte_carlo")
    assert result is None if changed else "3 of 3 continuations" in result["error"]


# verl's vLLM server hands flat log-probs of prompts on as they are, and starts as the registry's


@pytest.mark.slow
def test_flat_log_probs_are_handed_on_with_what_the_cache_gave() -> None:
    pytest.importorskip("vllm")
    from vllm.logprobs import FlatLogprobs, Logprob

    from recipe.offpolicy.extensions.process_reward.prefix_scorer import PROMPT
    from recipe.offpolicy.extensions.process_reward.scoring_server import keep_flat

    seen: list[Any] = []
    keep = keep_flat(lambda *given: seen.append(given))
    flat = FlatLogprobs()
    for position in (None, {5: Logprob(-0.5, 1)}, {6: Logprob(-1.5, 2)}):
        flat.append(position)
    fields: dict[str, Any] = {}
    keep(SimpleNamespace(prompt_logprobs=flat, num_cached_tokens=1), 0, fields)
    kept = fields[PROMPT]
    assert (list(kept.ids), list(kept.log_probs), kept.cached) == ([5, 6], [-0.5, -1.5], 1)
    assert seen == []
    keep(SimpleNamespace(prompt_logprobs=None), None, fields)
    assert len(seen) == 1


@pytest.mark.slow
def test_replicas_of_vllm_start_servers_that_score(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from recipe.offpolicy.extensions.process_reward.prefix_value_rewards import serve_scores
    from recipe.offpolicy.extensions.process_reward.scoring_server import ScoringReplica, ScoringServer
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    serve_scores()
    assert RolloutReplicaRegistry.get("vllm") is ScoringReplica
    assert ScoringServer.score_tails.__doc__
