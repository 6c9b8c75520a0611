"""A stand-in for the package ``sglang``, whose engine answers verl's own SGLang server in SGLang's own format.

SGLang has no build for CPUs. verl's server class, client and agent loops run unchanged; this module computes the answer
of the engine process: one list of (log-prob, token id, text) per request.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

SERVER = "verl.workers.rollout.sglang_rollout"
VOCABULARY, END = 32, 0
Answer = list[tuple[float, int, None]]
"""(log-prob, token id, text) of each token of a response, as in ``meta_info["output_token_logprobs"]``."""


class _Module(ModuleType):
    """A module or package that has every class that is requested from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = GenerateRequest if name == "GenerateReqInput" else type(name, (), {})
        setattr(self, name, made)
        return made


@dataclass
class GenerateRequest:
    """What verl's server sends to the engine; an unknown field fails here, as it does in SGLang."""

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool
    image_data: Any = None
    video_data: Any = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_routed_experts: bool = False
    lora_path: str | None = None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        module.__version__ = "0.5.12"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def installed() -> Iterator[Any]:
    """Make ``sglang`` importable, and yield verl's module of its SGLang server; both are removed afterwards."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(f"{SERVER}.async_sglang_server")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang" or name.startswith(SERVER)]:
            del sys.modules[name]


@dataclass
class Engine:
    """SGLang's tokenizer manager, with a policy whose next token depends only on the last token.

    Attributes:
        logits: (VOCABULARY, VOCABULARY) of the next token, by the last one.
        raw: log-probs before the temperature, as ``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` has them.
        change: gets each answer and returns what is sent instead; None: the answer holds no log-probs.
        asked: requests, in their order.
    """

    logits: Tensor
    raw: bool = False
    change: Callable[[Answer], Answer | None] = lambda answer: answer
    asked: list[GenerateRequest] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    async def generate_request(self, request: GenerateRequest, http_request: None) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(request)
        answer = self._sample(request)
        meta: dict[str, Any] = {"id": request.rid, "finish_reason": {"type": "stop", "matched": END}}
        if request.return_logprob:
            meta["output_token_logprobs"] = self.change(answer)
        yield {"text": "", "output_ids": [token for _, token, _ in answer], "meta_info": meta}

    def _sample(self, request: GenerateRequest) -> Answer:
        asked, answer, last = request.sampling_params, [], request.input_ids[-1]
        for _ in range(asked["max_new_tokens"]):
            scaled = torch.log_softmax(self.logits[last] / asked["temperature"], -1)
            token = int(torch.multinomial(scaled.exp(), 1, generator=self.generator))
            # SGLang takes log-probs after the temperature and before top-k, top-p and min-p.
            reported = torch.log_softmax(self.logits[last], -1) if self.raw else scaled
            answer.append((float(reported[token]), token, None))
            if (last := token) == END:
                break
        return answer


def build_server(module: Any, engine: Engine, *, response_length: int) -> Any:
    """Build verl's own ``SGLangHttpServer`` around the engine, without starting SGLang's processes."""
    server = object.__new__(module.SGLangHttpServer)
    server.config = SimpleNamespace(
        max_model_len=256,
        prompt_length=128,
        response_length=response_length,
        enable_rollout_routing_replay=False,
        mtp=None,
    )
    server.model_config = SimpleNamespace(lora_rank=0, lora={})
    server.tokenizer_manager, server.replica_rank, server.global_steps = engine, 0, 1
    server._disaggregation_role, server._pd_decode_peers = "null", []
    return server


def roll_out(server: Any, prompts: Sequence[Sequence[int]], sampling_params: dict[str, Any]) -> TensorDict:
    """Sample one response per prompt through verl's client, and pack the responses as V1's agent loop does."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
    from verl.workers.rollout.llm_server import LLMServerClient

    class Client(LLMServerClient):
        async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
            return "0", SimpleNamespace(generate=SimpleNamespace(remote=server.generate))

        def _release_server(self, server_id: str, request_id: str | None = None) -> None:
            pass

    client = object.__new__(Client)
    client.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="sglang")))

    async def sample(place: int, prompt: Sequence[int]) -> dict[str, Any]:
        # Ray copies what a server is given; verl's server pops keys of it.
        output = await client.generate(str(place), prompt_ids=list(prompt), sampling_params=dict(sampling_params))
        return AgentLoopOutput(
            prompt_ids=list(prompt),
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs if output.log_probs else None,
            metrics=AgentLoopMetrics(),
            extra_fields=output.extra_fields,
        ).as_dict()

    async def sample_all() -> list[dict[str, Any]]:
        return [await sample(*each) for each in enumerate(prompts)]

    return list_of_dict_to_tensordict(asyncio.run(sample_all()))


def score(rows: TensorDict, logits: Tensor, temperature: float) -> Tensor:
    """Compute the policy's own log-probs of the responses, nested by row."""
    by_last = torch.log_softmax(logits / temperature, -1)
    scored = []
    for prompt, response in zip(rows["prompts"].unbind(), rows["responses"].unbind(), strict=True):
        before = torch.cat([prompt[-1:], response[:-1]])
        scored.append(by_last[before, response])
    return torch.nested.as_nested_tensor(scored, layout=torch.jagged)
