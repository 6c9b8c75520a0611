"""Agent loops whose rows are scored between their last token and their reward, on verl's V0 and V1 trainers.

Patched or overridden in verl 0.9.1: ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``, the attribute
``agent_loop_workers_class`` of managers, ``AgentLoopWorkerTQ._agent_loop_postprocess(self, output, validate,
**kwargs)`` and, on the V0 trainer and in 0.8.0, that of ``AgentLoopWorker``, which receives every agent loop's output;
``_acquire_server(self, request_id, **extra)`` and ``_release_server(self, server_id, request_id=None)`` of
``LLMServerClient``, through which a row's requests go to the replica that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from inspect import signature
from typing import Any

import ray
from omegaconf import OmegaConf

from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl_patches import agent_loops, engine_loss

from ...batch.weight_versions import NEWEST_VERSION
from .columns import FIELD, SECTION
from .prefix_scorer import PrefixScorer, Row
from .settings import ProcessSettings
from .tail_scores import Tail, TailScores

_request: ContextVar[str | None] = ContextVar("offpolicy_process_request", default=None)
"""Id of the request that sampled the current row's last token."""


class RequestMemory:
    """A client of the rollout servers that remembers which request sampled a row."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        if name == "_client":  # unpickled but not filled in yet
            raise AttributeError(name)
        return getattr(self._client, name)

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        """Generate like the client."""
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

        # From 0.9.0 on a router may read a request's content.
        looks = "request_id" in signature(client._release_server).parameters

        async def ask(request: str, row: Sequence[int], tails: Sequence[Tail], read_cache: bool) -> TailScores:
            content: dict[str, Any] = {"prompt_ids": row, "sampling_params": {}} if looks else {}
            name, server = await client._acquire_server(request, **content)
            try:
                found: TailScores = await server.score_tails.remote(row, tails, read_cache)
                return found
            finally:
                client._release_server(name, *((request,) if looks else ()))

        self._scorer = PrefixScorer(ProcessSettings.from_mapping(SECTION, settings), ask, self.tokenizer)
        self.llm_client = RequestMemory(client)

    async def _agent_loop_postprocess(self, output: Any, validate: Any, **kwargs: Any) -> Any:
        if not validate:
            for each in output if isinstance(output, list) else [output]:
                each.extra_fields[FIELD] = await self._score(each, kwargs.get("reward_model"))
        return await super()._agent_loop_postprocess(output, validate, **kwargs)  # type: ignore[misc]

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
        engine_loss.check(agent_loops.SEAMS)
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(ScoringWorkerV0)
