"""An external module for verl that makes rollouts and trainer disagree on purpose, one cause at a time.

    OFFPOLICY_INJECT=name:strength    one of FAULTS, in VERL_USE_EXTERNAL_MODULES beside verl_patches.cpu

    temperature:0.8    the rollout server samples at this temperature, the trainer scores at its own
    shift:1            log-probs arrive one token late (-1: early)
    lag:8              the rollout server gets the weights of 8 synchronisations before; the first ones until there are
    stale:3            of every three synchronisations two send the weights of the one before
    round:3            weights reach the rollout server with this many bits of mantissa
    routers:4          those of the routers of a mixture of experts do, and no others
    cache:3            of every three synchronisations one clears the engine's prefix cache; of 1 each one does, as verl

Each acts in the process where the real fault would: the agent loop, the sender of the weights, or the rollout server.
OFFPOLICY_INJECT_CACHE=path: ``cache`` writes there what came from the prefix cache, a line of JSON a synchronisation.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_patches.deferred import after_import

NAME, _, STRENGTH = os.environ.get("OFFPOLICY_INJECT", "none").partition(":")

Weights = Iterable[tuple[str, Tensor]]


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Round ``weight`` to ``bits`` of mantissa beside the leading one, as an engine of lower precision holds it."""
    mantissa, exponent = torch.frexp(weight.float())
    scale = 2.0 ** (bits + 1)
    return torch.ldexp(torch.round(mantissa * scale) / scale, exponent).to(weight.dtype)


def moved(log_probs: list[float], by: int) -> list[float]:
    """Rotate log-probs by ``by`` tokens: those moved out at one end come in at the other."""
    by %= max(len(log_probs), 1)
    return log_probs[-by:] + log_probs[:-by] if by else list(log_probs)


def _agent_loop() -> Any:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    # Ray wraps a class into an actor class; the class itself is kept in its metadata.
    return AgentLoopWorkerTQ.__ray_metadata__.modified_class


def _temperature() -> None:
    plain, temperature = _agent_loop(), float(STRENGTH)
    original = plain._run_prompt

    @functools.wraps(original)
    async def _run_prompt(self: Any, prompt: Any, sampling_params: Any, trajectory: Any, trace: bool = False) -> None:
        if not trajectory["validate"]:
            sampling_params = {**sampling_params, "temperature": temperature}
        await original(self, prompt, sampling_params, trajectory, trace)

    plain._run_prompt = _run_prompt


def _shift() -> None:
    plain, by = _agent_loop(), int(STRENGTH)
    original = plain._agent_loop_postprocess

    @functools.wraps(original)
    async def _agent_loop_postprocess(self: Any, output: Any, validate: bool, **kwargs: Any) -> None:
        for one in output if isinstance(output, list) else [output]:
            one.response_logprobs = moved(one.response_logprobs, by)
        await original(self, output, validate, **kwargs)

    plain._agent_loop_postprocess = _agent_loop_postprocess


def _send(change: Callable[[Any, Weights], Weights]) -> None:
    """Wrap the sender so that it sends ``change`` of the trainer's weights."""
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    original = ServerAdapter.update_weights

    @functools.wraps(original)
    async def update_weights(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        return await original(self, await _collected(weights, functools.partial(change, self)), *args, **kwargs)

    ServerAdapter.update_weights = update_weights


async def _collected(weights: Any, change: Callable[[Weights], Weights]) -> Iterator[tuple[str, Tensor]]:
    """Collect copies of all weights at once, from either kind of iterator: the model is small."""
    if isinstance(weights, AsyncIterator):
        pairs = [(name, weight.clone()) async for name, weight in weights]
    else:
        pairs = [(name, weight.clone()) for name, weight in weights]
    return iter(list(change(pairs)))


def round_matrices(weights: Weights, bits: int, named: str = "") -> Weights:
    """Round the matrices whose name ends so, see ``rounded``."""
    return [
        (name, rounded(weight, bits) if weight.dim() > 1 and name.endswith(named) else weight)
        for name, weight in weights
    ]


def _round(named: str = "") -> None:
    bits = int(STRENGTH)
    _send(lambda sender, weights: round_matrices(weights, bits, named))


def _stale() -> None:
    period = int(STRENGTH)

    def change(sender: Any, weights: Weights) -> Weights:
        count, held = getattr(sender, "_injected", (0, []))
        if count % period == 0:
            held = list(weights)
        sender._injected = (count + 1, held)
        return held

    _send(change)


class LateWeights:
    """A ring of weights: what comes out went in ``behind`` calls before, the first ones until there are as many."""

    def __init__(self, behind: int) -> None:
        self._ring: deque[list[tuple[str, Tensor]]] = deque(maxlen=behind + 1)

    def __call__(self, weights: Weights) -> Weights:
        self._ring.append(list(weights))
        return self._ring[0]


def _lag() -> None:
    behind = int(STRENGTH)

    def change(sender: Any, weights: Weights) -> Weights:
        if not hasattr(sender, "_injected"):
            sender._injected = LateWeights(behind)
        late: Weights = sender._injected(weights)
        return late

    _send(change)


class CacheAges:
    """Ages of the keys and values that requests took from the prefix cache.

    A prefix is as old as the last request that computed it. Requests of one synchronisation are sorted when the next
    one begins, as those that compute a prefix may end after those that take it.
    """

    def __init__(self) -> None:
        self.synchronisation = 0
        self._computed: dict[tuple[int, ...], int] = {}
        self._requests: list[tuple[tuple[int, ...], int]] = []

    def served(self, prompt: Sequence[int], cached: int) -> None:
        """Note the end of a request with this prompt, whose first ``cached`` tokens came from the cache."""
        self._requests.append((tuple(prompt), cached))

    def synchronised(self) -> dict[str, Any]:
        """Note new weights; return what was served since the last ones, and tokens from the cache by their age.

        The age is in synchronisations; 0 is what the weights of the time had computed themselves.
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
    reset, generate = AsyncLLM.reset_prefix_cache, AsyncLLM.generate

    @functools.wraps(reset)
    async def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = await reset(self, *args, **kwargs) if ages.synchronisation % period == 0 else True
        line = ages.synchronised()
        if target:
            with Path(target).open("a") as sink:
                sink.write(json.dumps(line) + "\n")
        return done

    @functools.wraps(generate)
    async def counted(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        last = None
        async for last in generate(self, *args, **kwargs):
            yield last
        if last is not None:
            ages.served(last.prompt_token_ids, last.num_cached_tokens or 0)

    AsyncLLM.reset_prefix_cache, AsyncLLM.generate = reset_prefix_cache, counted


_LOOP = "verl.trainer.ppo.v1.agent_loop_tq"
_SENDER = "verl.workers.rollout.vllm_rollout.vllm_rollout"
_ENGINE = "vllm.v1.engine.async_llm"

FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "temperature": (_LOOP, _temperature),
    "shift": (_LOOP, _shift),
    "lag": (_SENDER, _lag),
    "stale": (_SENDER, _stale),
    "round": (_SENDER, _round),
    "routers": (_SENDER, functools.partial(_round, ".mlp.gate.weight")),
    "cache": (_ENGINE, _cache),
}
"""Name -> the module that it waits for, and what it does there."""

if NAME in FAULTS:
    after_import(*FAULTS[NAME])
elif NAME != "none":
    raise ValueError(f"OFFPOLICY_INJECT={NAME}: unknown, one of {', '.join(FAULTS)}")
