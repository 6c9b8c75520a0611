"""Agent loops that score each row after sampling and before it is rewarded, for verl's V0 and V1 trainers.

Patched or overridden in verl 0.9.1: ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``, the attribute
``agent_loop_workers_class`` of managers, and ``AgentLoopWorkerTQ._agent_loop_postprocess(self, output, validate,
**kwargs)``, which receives every agent loop's output (on the V0 trainer and in 0.8.0, this is a method of
``AgentLoopWorker``); ``_compute_score(self, outputs, kwargs)`` of the same workers, ``_acquire_server(self, request_id,
**extra)`` and ``_release_server(self, server_id, request_id=None)`` of ``LLMServerClient``, through which a row's
requests go to the replica that sampled it.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from inspect import signature
from typing import Any
from uuid import uuid4

import ray
from omegaconf import OmegaConf

from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl_patches import rollout_seams
from verl_patches.contract import check_all

from ...batch.weight_versions import NEWEST_VERSION, OLDEST_VERSION, VERSION
from .prefix_scorer import ABORTED, FIELD, PrefixScorer, Row, Tail, TailScores
from .settings import SECTION, MonteCarloSettings, ProcessSettings

_request: ContextVar[str | None] = ContextVar("offpolicy_process_request", default=None)
"""Id of the request that sampled the last token of the current row."""

Sample = Callable[[list[int], int, int], Awaitable[list[int] | None]]
"""Called with (ids, maximum number of tokens, seed); continues the ids with the policy that sampled them. Returns None
after an abort or a weight change."""
Score = Callable[[list[int]], Awaitable[float]]
"""Reward of a whole response."""


def choose_prefix(
    settings: MonteCarloSettings, version: int | None, response: Sequence[int], ends: Sequence[int]
) -> tuple[int, random.Random] | None:
    """Choose which prefix of a row to check (0 is the prompt), and the random source of seeds; None for no check.

    The choice depends only on the version and the response, so it is the same in every worker.
    """
    if settings.every is None or version is None or version % settings.every:
        return None
    source = random.Random(f"{version} {list(response)}")
    return (source.randint(0, len(ends)), source) if source.random() < settings.share else None


async def continue_prefix(
    prompt: Sequence[int],
    prefix: Sequence[int],
    most: int,
    sample: Sample,
    score: Score,
    *,
    samples: int,
    source: random.Random,
) -> dict[str, Any]:
    """Sample ``samples`` responses of up to ``most`` tokens that begin with ``prefix``, and reward them.

    This is VinePPO's estimate of V(prefix) (arXiv:2410.01679). It is unbiased, but too expensive for every prefix.

    Returns:
        The rewards' ``mean`` and the number of sampled ``tokens``, or an ``error``.
    """
    room, ids = most - len(prefix), [*prompt, *prefix]
    if not room:
        return {"error": "the prefix already has the maximum response length."}
    found = await asyncio.gather(*(sample(ids, room, source.getrandbits(31)) for _ in range(samples)))
    whole = [[*prefix, *more] for more in found if more is not None]
    if len(whole) < samples:
        return {
            "error": f"{samples - len(whole)} of {samples} continuations were aborted, or sampled by other weights."
        }
    rewards = await asyncio.gather(*map(score, whole))
    if not all(map(math.isfinite, rewards)):
        return {"error": "the reward of a continuation is not finite."}
    return {"mean": math.fsum(rewards) / samples, "tokens": sum(map(len, whole)) - samples * len(prefix)}


class RequestMemory:
    """A client of the rollout servers that stores the id of the request that sampled a row."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        if name == "_client":  # unpickled but not yet filled in
            raise AttributeError(name)
        return getattr(self._client, name)

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        """Generate like the wrapped client, and store the request's id."""
        _request.set(request_id)
        return await self._client.generate(request_id, **kwargs)


class ScoringWorker:
    """Mixin of verl's agent loop workers."""

    config: Any
    llm_client: Any
    tokenizer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        client = self.llm_client
        settings: Any = OmegaConf.to_container(self.config[SECTION], resolve=True)

        # In 0.9.0 and later, a router may read a request's content.
        looks = "request_id" in signature(client._release_server).parameters

        async def ask(request: str, row: Sequence[int], tails: Sequence[Tail], read_cache: bool) -> TailScores:
            content: dict[str, Any] = {"prompt_ids": row, "sampling_params": {}} if looks else {}
            name, server = await client._acquire_server(request, **content)
            try:
                found: TailScores = await server.score_tails.remote(row, tails, read_cache)
                return found
            finally:
                client._release_server(name, *((request,) if looks else ()))

        self._settings = ProcessSettings.from_mapping(SECTION, settings)
        self._scorer = PrefixScorer(self._settings, ask, self.tokenizer)
        self.llm_client = RequestMemory(client)

    async def _agent_loop_postprocess(self, output: Any, validate: Any, **kwargs: Any) -> Any:
        if not validate:
            outputs = output if isinstance(output, list) else [output]
            for each in outputs:
                each.extra_fields[FIELD] = await self._score(each, kwargs.get("reward_model"))
            if len(outputs) == 1 and all(output.response_mask):
                found = output.extra_fields[FIELD]
                found["monte_carlo"] = await self._continue(output, found, kwargs)
        return await super()._agent_loop_postprocess(output, validate, **kwargs)  # type: ignore[misc]

    async def _continue(self, output: Any, found: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """If the row is chosen for a check, sample rollouts from one of its prefixes and reward them as verl would."""
        settings, version = self._settings.monte_carlo, found.get("version")
        chosen = choose_prefix(settings, version, output.response_ids, found["ends"]) if found["values"] else None
        if chosen is None:
            return None
        number, source = chosen
        rollout = self.config.actor_rollout_ref.rollout
        how = {name: rollout[name] for name in ("temperature", "top_p", "top_k")} | {"repetition_penalty": 1.0}

        async def sample(ids: list[int], most: int, seed: int) -> list[int] | None:
            given = {**how, "max_tokens": most, "seed": seed}
            made = await self.llm_client._client.generate(uuid4().hex, prompt_ids=ids, sampling_params=given)
            named = (made.extra_fields.get(name) for name in (VERSION, OLDEST_VERSION, NEWEST_VERSION))
            versions = {each for each in named if each is not None}
            return None if made.stop_reason in ABORTED or versions != {version} else list(made.token_ids)

        async def score(response: list[int]) -> float:
            whole = copy.copy(output)
            whole.response_ids, whole.response_mask = response, [1] * len(response)
            whole.response_logprobs = whole.reward_score = None
            whole.metrics, whole.extra_fields = copy.copy(output.metrics), {**output.extra_fields}
            whole.extra_fields.pop(FIELD)
            await self._compute_score([whole], kwargs=kwargs)  # type: ignore[attr-defined]
            if whole.reward_score is None:
                raise ValueError("verl's agent loops compute no rewards here.")
            return float(whole.reward_score)

        prefix = output.response_ids[: found["ends"][number - 1]] if number else []
        most = int(rollout.response_length)
        try:
            result = await continue_prefix(
                output.prompt_ids, prefix, most, sample, score, samples=settings.samples, source=source
            )
        except Exception as error:  # after an exception, verl would replace the row's group with padding
            result = {"error": f"{type(error).__name__}: {error}"}
        return {"number": number, **result}

    async def _score(self, output: Any, truth: Any) -> dict[str, Any]:
        if output.multi_modal_data:
            return {"error": "sequences with images, videos or audio are not scored.", "values": [], "ends": []}
        fields = output.extra_fields
        version = fields.get(NEWEST_VERSION)
        return await self._scorer.score(
            Row(
                prompt=output.prompt_ids,
                response=output.response_ids,
                mask=output.response_mask,
                truth=truth,
                version=fields.get("global_steps") if version is None else version,
                request=_request.get(),
            )
        )


class ScoringWorkerV0(ScoringWorker, AgentLoopWorker):
    """verl's agent loop worker of the V0 trainer."""


class ScoringManagerV0(AgentLoopManager):
    """verl's manager of the V0 trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_all(rollout_seams.AGENT_LOOPS)
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(ScoringWorkerV0)
