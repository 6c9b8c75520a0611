"""Log-probs of answers forced after prefixes of one row, computed in the rollout server that sampled the row.

vLLM returns log-probs of a prompt's tokens (``prompt_logprobs``). At positions read from vLLM's prefix cache, these
log-probs are uninitialised memory with the ids of other requests. Therefore, only values accepted by ``read_answer``
are used.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

PROMPT = "offpolicy_prompt"
"""Key of the ``ScoredPrompt`` in a server's answer."""
ABORTED = ("aborted", "abort")


class ScoredPrompt(NamedTuple):
    """An engine's scores of a prompt.

    Attributes:
        ids, log_probs: ids and log-probs of the prompt's tokens except the first, or of fewer tokens at the prompt's
            end.
        cached: number of the prompt's tokens that were read from the prefix cache; None if the engine does not report
            it.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    cached: int | None


class Output(Protocol):
    """The part of verl's ``TokenOutput`` that is read."""

    stop_reason: str | None
    extra_fields: dict[str, Any]


Generate = Callable[..., Awaitable[Output]]
"""verl's ``vLLMHttpServer.generate``: (prompt_ids, sampling_params, request_id)."""


@dataclass(frozen=True)
class Tail:
    """Tokens forced after a prefix.

    Attributes:
        end: end of the prefix, exclusive, in the row's ids.
        ids: ids of force prompt and answer.
        answer: number of ids at the end that form the answer.
        may_read: whether the prefix may be read from the cache; False if siblings force the same tail, which would then
            be cached as well.
    """

    end: int
    ids: tuple[int, ...]
    answer: int
    may_read: bool


@dataclass
class TailScores:
    """Scores of a row's tails, in their order.

    Attributes:
        means: mean log-probs of the answer's tokens; None if the engine did not score them.
        versions: versions of the weights with which the scores were computed.
        aborted: True if a synchronisation of the weights ended a request, so that means are incomplete.
        requests, forward, cached, rescored: number of requests, of tokens computed for them, of tokens read from the
            cache for them, and of requests repeated without the cache.
        error: explanation if the server's answers do not contain log-probs of prompts; None otherwise.
    """

    means: list[float | None]
    versions: list[int | None] = field(default_factory=list)
    aborted: bool = False
    requests: int = 0
    forward: int = 0
    cached: int = 0
    rescored: int = 0
    error: str | None = None


def read_answer(
    scored: ScoredPrompt, prompt: Sequence[int], answer: Sequence[int], *, read_cache: bool
) -> list[float] | None:
    """Read the answer's log-probs from the end of a scored prompt; None if they are not reliable.

    Log-probs are read from the end because some engines omit the first tokens. The prompt must end in the answer's own
    ids. If the cache may have been read, the position before the answer must have been computed.
    """
    count = len(answer)
    if list(scored.ids[-count:]) != list(answer) or len(scored.log_probs) != len(scored.ids):
        return None
    if read_cache and (scored.cached is None or scored.cached > len(prompt) - count - 1):
        return None
    found = [float(each) for each in scored.log_probs[-count:]]
    return found if all(math.isfinite(each) and each <= 1e-3 for each in found) else None


async def score_tails(generate: Generate, row: Sequence[int], tails: Sequence[Tail], *, read_cache: bool) -> TailScores:
    """Score the tails after prefixes of a row (ids of prompt and response), all at once."""
    scores = TailScores([None] * len(tails))
    await asyncio.gather(*(_score(generate, row, tails, each, scores, read_cache) for each in range(len(tails))))
    return scores


async def _score(
    generate: Generate, row: Sequence[int], tails: Sequence[Tail], number: int, scores: TailScores, read_cache: bool
) -> None:
    """Score one tail, using the cache if that is allowed, and again without the cache if the result is not reliable."""
    tail = tails[number]
    prompt = [*row[: tail.end], *tail.ids]
    for read in (True, False) if read_cache and tail.may_read else (False,):
        output = await generate(
            prompt_ids=prompt, sampling_params=build_sampling(read_cache=read), request_id=uuid4().hex
        )
        scores.requests += 1
        if output.stop_reason in ABORTED:
            scores.aborted = True
            return
        scored = output.extra_fields.get(PROMPT)
        if scored is None:
            scores.error = "the rollout server's answer holds no prompt_logprobs."
            return
        scores.cached += scored.cached or 0
        scores.forward += len(prompt) - (scored.cached or 0)
        scores.versions.append(output.extra_fields.get("global_steps"))
        found = read_answer(scored, prompt, tail.ids[-tail.answer :], read_cache=read)
        if found is not None:
            scores.means[number] = math.fsum(found) / len(found)
            return
        scores.rescored += 1


def build_sampling(*, read_cache: bool) -> dict[str, Any]:
    """Build vLLM's sampling parameters for a request that scores its prompt, at temperature 1."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 1,
        "prompt_logprobs": 0,
        # This returns two lists per prompt instead of one object per position.
        "flat_logprobs": True,
        # Ids at cached positions may be outside the vocabulary.
        "detokenize": False,
        "skip_reading_prefix_cache": not read_cache,
    }
