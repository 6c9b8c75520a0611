"""Values of prefixes at the ends of episodes, computed by the rollout server that sampled the row.

Agent loops call ``PrefixScorer.score``; the server runs ``score_tails``. vLLM returns log-probs of a prompt's tokens
(``prompt_logprobs``). At positions read from vLLM's prefix cache, it returns uninitialised memory and the ids of other
requests instead. Therefore, only values accepted by ``read_answer`` are used.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from .episodes import ScoringError, episode_ends, find_region, list_pieces, read_answers, tokenize_answer
from .settings import ProcessSettings

FIELD = "offpolicy_process"
"""Key of a row's extra fields, see ``RowValues``."""
PROMPT = "offpolicy_prompt"
"""Key of the ``ScoredPrompt`` in a server's answer."""
ABORTED = ("aborted", "abort")


class ScoredPrompt(NamedTuple):
    """An engine's scores of a prompt.

    Attributes:
        ids, log_probs: ids and log-probs of the prompt's tokens except the first; some engines return only the last
            ones.
        cached: number of the prompt's tokens that were read from the prefix cache; None if the engine does not report
            it.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    cached: int | None


Generate = Callable[..., Awaitable[Any]]
"""verl's ``vLLMHttpServer.generate``: (prompt_ids, sampling_params, request_id) -> TokenOutput."""


@dataclass(frozen=True)
class Tail:
    """Tokens forced after a prefix.

    Attributes:
        end: end of the prefix, exclusive, in the row's ids.
        ids: ids of force prompt and answer.
        answer: number of ids at the end that form the answer.
        may_read: whether the prefix may be read from the cache. False if siblings force the same tail, because the tail
            would then be in the cache as well.
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
        aborted: True if a weight synchronisation ended a request, which leaves ``means`` incomplete.
        requests, forward, cached, rescored: number of requests, of tokens computed, of tokens read from the cache, and
            of requests repeated without the cache.
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

    Log-probs are read from the end, because some engines omit the first tokens. The prompt must end with the answer's
    ids. If the cache may have been read, the position before the answer must not come from the cache.
    """
    count = len(answer)
    if list(scored.ids[-count:]) != list(answer) or len(scored.log_probs) != len(scored.ids):
        return None
    if read_cache and (scored.cached is None or scored.cached > len(prompt) - count - 1):
        return None
    found = [float(each) for each in scored.log_probs[-count:]]
    return found if all(math.isfinite(each) and each <= 1e-3 for each in found) else None


async def score_tails(generate: Generate, row: Sequence[int], tails: Sequence[Tail], *, read_cache: bool) -> TailScores:
    """Score all tails of a row concurrently; ``row`` contains the ids of prompt and response."""
    scores = TailScores([None] * len(tails))
    await asyncio.gather(*(_score(generate, row, tails, each, scores, read_cache) for each in range(len(tails))))
    return scores


async def _score(
    generate: Generate, row: Sequence[int], tails: Sequence[Tail], number: int, scores: TailScores, read_cache: bool
) -> None:
    """Score one tail, with the cache if allowed; score it again without the cache if the result is not reliable."""
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
            scores.error = "the rollout server's answer contains no prompt_logprobs."
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
    """Build vLLM's sampling parameters for a request that scores its own prompt at temperature 1."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 1,
        "prompt_logprobs": 0,
        # vLLM then returns two lists per prompt instead of one object per position.
        "flat_logprobs": True,
        # Ids at cached positions may be outside the vocabulary.
        "detokenize": False,
        "skip_reading_prefix_cache": not read_cache,
    }


ROUNDS = 3
"""Maximum number of attempts to obtain all values of a row from the weights that sampled its last token."""
PAUSE = 1.0
"""Seconds before a row is scored again after an abort, as in verl's resuming client."""


AskServer = Callable[[str, Sequence[int], Sequence[Tail], bool], Awaitable[TailScores]]
"""Calls ``score_tails`` on the server to which a request id is routed: (request_id, row, tails, read_cache)."""


@dataclass(frozen=True)
class Row:
    """A sampled row.

    Attributes:
        prompt, response: token ids.
        mask: response mask, 1 on tokens that the policy sampled.
        truth: the row's ``reward_model`` column.
        version: version of the weights that sampled the row's last token; None if the server does not report it.
        request: id by which the router finds the replica that sampled the row.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[int]
    truth: Any
    version: int | None = None
    request: str | None = None


@dataclass
class RowValues:
    """Values of one row, which are sent together with the row.

    Attributes:
        ends: ends of the row's episodes, exclusive.
        values: V_0..V_m; empty for a row that was not scored.
        version: version of the weights with which all values were computed.
        answers: for each alternative answer, (ids of force prompt and answer, number of ids of the answer).
        best: the alternative of each value.
        requests, forward, cached, rescored: number of requests, of tokens computed, of tokens read from the cache, and
            of requests repeated without the cache.
        began, ended: start and end of the scoring, in seconds of ``time.time``.
        error: the reason why the row was not scored.
        monte_carlo: the ``number`` of the checked prefix and the result of ``manager.continue_prefix``; None: no check.
    """

    ends: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    version: int | None = None
    answers: list[tuple[list[int], int]] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    requests: int = 0
    forward: int = 0
    cached: int = 0
    rescored: int = 0
    began: float = 0.0
    ended: float = 0.0
    error: str | None = None
    monte_carlo: Mapping[str, Any] | None = None


def find_boundaries(
    pieces: Sequence[str], mask: Sequence[int], response: Sequence[int], settings: ProcessSettings, eos: frozenset[int]
) -> list[int]:
    """Find the ends of a response's episodes, each after a token that the policy sampled."""
    # A marker in a tool's output was not written by the policy.
    shown = [piece if own else "" for piece, own in zip(pieces, mask, strict=True)]
    count = find_region(shown, settings.think_end)
    while count and response[count - 1] in eos:
        count -= 1
    ends = episode_ends(
        shown[:count], markers=settings.markers, max_tokens=settings.max_tokens, max_episodes=settings.max_episodes
    )
    behind: list[int] = []
    for end in ends:
        while end and not mask[end - 1]:
            end -= 1
        if end > (behind[-1] if behind else 0):
            behind.append(end)
    return behind


class PrefixScorer:
    """Scores rows with a rollout server.

    Args:
        settings: settings of the run.
        ask: calls the server.
        tokenizer: the policy's tokenizer.
    """

    def __init__(self, settings: ProcessSettings, ask: AskServer, tokenizer: Any) -> None:
        self._settings, self._ask, self._tokenizer = settings, ask, tokenizer
        eos = tokenizer.eos_token_id
        self._eos = frozenset(eos if isinstance(eos, list) else [eos])

    async def score(self, row: Row) -> dict[str, Any]:
        """Score a row; return a plain dictionary, in which ``error`` is set if the row cannot be scored."""
        result = RowValues(began=time.time())
        try:
            await self._score(row, result)
        except Exception as error:
            # If an exception were raised here, verl would replace the row's group with padding.
            kind = "" if isinstance(error, ScoringError) else f"{type(error).__name__}: "
            result.values, result.error = [], f"{kind}{error}"
        result.ended = time.time()
        return asdict(result)

    async def _score(self, row: Row, result: RowValues) -> None:
        settings = self._settings
        pieces = list_pieces(self._tokenizer, row.response)
        result.answers = self._tokenize(row)
        result.ends = find_boundaries(pieces, row.mask, row.response, settings, self._eos)
        ids = [*row.prompt, *row.response]
        # Siblings request the same V_0, so the answer itself would be cached.
        tails = [
            Tail(len(row.prompt) + end, tuple(forced), answer, may_read=end > 0)
            for end in (0, *result.ends)
            for forced, answer in result.answers
        ]
        versions: set[Any] = set()
        for _ in range(ROUNDS):
            request = uuid4().hex if row.request is None else row.request
            scores = await self._ask(request, ids, tails, settings.prefix_cache == "auto")
            for name in ("requests", "forward", "cached", "rescored"):
                setattr(result, name, getattr(result, name) + getattr(scores, name))
            if scores.error is not None:
                raise ScoringError(scores.error)
            versions = set(scores.versions)
            if scores.aborted:
                await asyncio.sleep(PAUSE)
            elif versions == {row.version}:
                self._fill(result, tails, scores.means)
                result.version = row.version
                return
        shown = ", ".join(map(str, sorted(versions, key=str))) or "none, because its requests were aborted"
        raise ScoringError(
            f"the last token was sampled by weights of version {row.version}, but the values have {shown}."
        )

    def _tokenize(self, row: Row) -> list[tuple[list[int], int]]:
        """Tokenise force prompt and answer, once for each alternative."""
        settings, answers = self._settings, []
        for text in read_answers(row.truth, settings.max_answers):
            ids, count = tokenize_answer(self._tokenizer, settings.force_prompt, text)
            if count > (most := settings.max_answer_tokens):
                raise ScoringError(f"the answer {text[:40]!r} has {count} tokens, more than max_answer_tokens={most}.")
            answers.append((ids, count))
        return answers

    def _fill(self, result: RowValues, tails: Sequence[Tail], means: Sequence[float | None]) -> None:
        """Set each prefix's value to that of the likeliest answer, and record which answer it was."""
        found = [mean for mean in means if mean is not None]
        if len(found) < len(means):
            tail = tails[means.index(None)]
            raise ScoringError(
                f"the rollout server did not score the {tail.answer} tokens of the answer that follow the first "
                f"{tail.end} tokens."
            )
        alternatives = len(result.answers)
        for first in range(0, len(found), alternatives):
            best = max(range(first, first + alternatives), key=found.__getitem__)
            result.values.append(max(found[best], self._settings.floor))
            result.best.append(best - first)
