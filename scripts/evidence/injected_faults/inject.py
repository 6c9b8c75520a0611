"""An external module for verl that deliberately makes rollouts and trainer disagree, for one cause at a time.

    OFFPOLICY_INJECT=name:strength    one of FAULTS, in VERL_USE_EXTERNAL_MODULES next to verl_patches.cpu

    temperature:0.8    the rollout server samples at this temperature, but the trainer scores at its own
    shift:1            log-probs arrive one token late (-1: early)
    lag:8              the rollout server loads the weights from 8 synchronisations ago; at the start, the first ones
    stale:3            of every three synchronisations, two send the previous synchronisation's weights again
    round:3            weights reach the rollout server with this many bits of mantissa
    routers:4          the same, but only for the router weights of a mixture of experts
    cache:3            of every three synchronisations, one clears the engine's prefix cache; with 1, all do, as in verl

Each fault acts in the process where the real fault would occur: the agent loop, the sender of the weights, or the
rollout server. With OFFPOLICY_INJECT_CACHE=path, ``cache`` writes to this file what came from the prefix cache, as one
line of JSON per synchronisation.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_patches.deferred import after_import

NAME, _, STRENGTH = os.environ.get("OFFPOLICY_INJECT", "none").partition(":")

Weights = Iterable[tuple[str, Tensor]]


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Round ``weight`` to ``bits`` of mantissa after the leading bit, as an engine of lower precision stores it."""
    mantissa, exponent = torch.frexp(weight.float())
    scale = 2.0 ** (bits + 1)
    return torch.ldexp(torch.round(mantissa * scale) / scale, exponent).to(weight.dtype)


def moved(log_probs: list[float], by: int) -> list[float]:
    """Rotate log-probs by ``by`` tokens; values that leave at one end reappear at the other."""
    by %= max(len(log_probs), 1)
    return log_probs[-by:] + log_probs[:-by] if by else list(log_probs)


def _agent_loop() -> Any:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    # Ray wraps a class in an actor class, and keeps the class itself in the actor class's metadata.
    return AgentLoopWorkerTQ.__ray_metadata__.modified_class


def _wrap(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method with the result of calling ``wrap`` on it."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))


def _temperature() -> None:
    temperature = float(STRENGTH)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        async def sampled(self: Any, prompt: Any, sampling: Any, trajectory: Any, trace: bool = False) -> None:
            changed = {} if trajectory["validate"] else {"temperature": temperature}
            await original(self, prompt, {**sampling, **changed}, trajectory, trace)

        return sampled

    _wrap(_agent_loop(), "_run_prompt", wrap)


def _shift() -> None:
    by = int(STRENGTH)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        async def shifted(self: Any, output: Any, validate: bool, **kwargs: Any) -> None:
            for one in output if isinstance(output, list) else [output]:
                one.response_logprobs = moved(one.response_logprobs, by)
            await original(self, output, validate, **kwargs)

        return shifted

    _wrap(_agent_loop(), "_agent_loop_postprocess", wrap)


def _send(begin: Callable[[], Callable[[Weights], Weights]]) -> None:
    """Wrap the sender so that it sends changed weights; ``begin`` makes the function that changes each sender's."""
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        async def update_weights(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
            self._injected = getattr(self, "_injected", None) or begin()
            # All weights are copied at once, which works for both kinds of iterators and is possible because the model
            # is small.
            if isinstance(weights, AsyncIterator):
                pairs = [(name, weight.clone()) async for name, weight in weights]
            else:
                pairs = [(name, weight.clone()) for name, weight in weights]
            return await original(self, iter(list(self._injected(pairs))), *args, **kwargs)

        return update_weights

    _wrap(ServerAdapter, "update_weights", wrap)


def round_matrices(weights: Weights, bits: int, named: str = "") -> Weights:
    """Round the matrices whose names have the given ending; see ``rounded``."""
    return [
        (name, rounded(weight, bits) if weight.dim() > 1 and name.endswith(named) else weight)
        for name, weight in weights
    ]


def _round(named: str = "") -> None:
    bits = int(STRENGTH)
    _send(lambda: lambda weights: round_matrices(weights, bits, named))


class StaleWeights:
    """Weights by call: within each group of ``period`` calls, every call returns the weights of the first call."""

    def __init__(self, period: int) -> None:
        self._period, self._calls = period, 0
        self._held: list[tuple[str, Tensor]] = []

    def __call__(self, weights: Weights) -> Weights:
        if self._calls % self._period == 0:
            self._held = list(weights)
        self._calls += 1
        return self._held


class LateWeights:
    """A ring buffer of weights: a call returns the weights from ``behind`` calls ago, at first the oldest weights."""

    def __init__(self, behind: int) -> None:
        self._ring: deque[list[tuple[str, Tensor]]] = deque(maxlen=behind + 1)

    def __call__(self, weights: Weights) -> Weights:
        self._ring.append(list(weights))
        return self._ring[0]


class CacheAges:
    """Ages of the cached keys and values that requests took from the prefix cache.

    A prefix is as old as the last request that computed it. Requests of one synchronisation are sorted when the next
    synchronisation begins, because requests that compute a prefix may end after requests that use it.
    """

    def __init__(self) -> None:
        self.synchronisation = 0
        self._computed: dict[tuple[int, ...], int] = {}
        self._requests: list[tuple[tuple[int, ...], int]] = []

    def served(self, prompt: Sequence[int], cached: int) -> None:
        """Record that a request with this prompt has ended; its first ``cached`` tokens came from the cache."""
        self._requests.append((tuple(prompt), cached))

    def synchronised(self) -> dict[str, Any]:
        """Record that there are new weights; return what was served since the previous ones, and cached tokens by age.

        The age is counted in synchronisations; 0 means that the tokens were computed with the weights of that time.
        """
        for prompt, cached in self._requests:
            for length in range(cached + 1, len(prompt) + 1):
                self._computed[prompt[:length]] = self.synchronisation
        ages: Counter[int] = Counter()
        for prompt, cached in self._requests:
            if cached:
                ages[self.synchronisation - self._computed[prompt[:cached]]] += cached
        result = {
            "synchronisation": self.synchronisation,
            "requests": len(self._requests),
            "tokens": sum(len(prompt) for prompt, _ in self._requests),
            "cached_by_age": {str(age): ages[age] for age in sorted(ages)},
        }
        self.synchronisation += 1
        self._requests = []
        return result


def _cache() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    period, ages, target = int(STRENGTH), CacheAges(), os.environ.get("OFFPOLICY_INJECT_CACHE", "")

    def clear_sometimes(reset: Callable[..., Any]) -> Callable[..., Any]:
        async def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
            done = await reset(self, *args, **kwargs) if ages.synchronisation % period == 0 else True
            line = ages.synchronised()
            if target:
                with Path(target).open("a") as sink:
                    sink.write(json.dumps(line) + "\n")
            return done

        return reset_prefix_cache

    def count(generate: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            last = None
            async for last in generate(self, *args, **kwargs):
                yield last
            if last is not None:
                ages.served(last.prompt_token_ids, last.num_cached_tokens or 0)

        return counted

    _wrap(AsyncLLM, "reset_prefix_cache", clear_sometimes)
    _wrap(AsyncLLM, "generate", count)


_LOOP = "verl.trainer.ppo.v1.agent_loop_tq"
_SENDER = "verl.workers.rollout.vllm_rollout.vllm_rollout"
_ENGINE = "vllm.v1.engine.async_llm"

FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "temperature": (_LOOP, _temperature),
    "shift": (_LOOP, _shift),
    "lag": (_SENDER, lambda: _send(lambda: LateWeights(int(STRENGTH)))),
    "stale": (_SENDER, lambda: _send(lambda: StaleWeights(int(STRENGTH)))),
    "round": (_SENDER, _round),
    "routers": (_SENDER, functools.partial(_round, ".mlp.gate.weight")),
    "cache": (_ENGINE, _cache),
}
"""Name -> the module whose import triggers the fault, and the function that then installs the fault."""

if NAME in FAULTS:
    after_import(*FAULTS[NAME])
elif NAME != "none":
    raise ValueError(f"OFFPOLICY_INJECT={NAME}: unknown. Use one of {', '.join(FAULTS)}")
