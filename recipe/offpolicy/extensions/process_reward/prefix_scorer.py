"""Values of prefixes, asked of the rollout engine right behind a row's last token, by the weights that sampled it.

vLLM returns log-probs of a prompt's tokens (``prompt_logprobs``). Positions that it reads from its prefix cache hold
uninitialised memory there, with ids of other requests, so that nothing is taken which ``read_answer`` does not admit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from .answer import AnswerError, Forced, list_pieces, read_answers, tokenize_answer
from .episodes import episode_ends, find_region
from .settings import ProcessSettings

ROUNDS = 3
"""Times that a row's values are asked for, until all are of one version, that of its last token."""
PAUSE = 1.0
"""Seconds before a row is scored anew after an abort, as verl's resuming client waits."""
CACHED = "num_cached_tokens"
"""Key of a server's answer: tokens of the prompt that were read from the prefix cache."""
ABORTED = ("aborted", "abort")


class ScoringError(RuntimeError):
    """The rollout engine did not score a prefix as it has to."""


class Output(Protocol):
    """The part of verl's ``TokenOutput`` that is read."""

    stop_reason: str | None
    extra_fields: dict[str, Any]


Generate = Callable[..., Awaitable[Output]]
"""verl's ``LLMServerClient.generate``: (request_id, *, prompt_ids, sampling_params)."""


@dataclass(frozen=True)
class Row:
    """A sampled row.

    Attributes:
        prompt, response: ids.
        mask: of the response, 1 on tokens that the policy sampled.
        truth: the row's ``reward_model`` column.
        version: of the weights that sampled its last token; None where the server does not say.
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
    """Values of one row, as they travel beside it.

    Attributes:
        ends: of its episodes, exclusive.
        values: V_0..V_m; empty for a row that was not scored.
        version: of the weights by which all of them were computed.
        answers: (ids of force prompt and answer, number of the answer's) of each alternative.
        best: the alternative that each value is of.
        requests, forward, cached, rescored: requests, their tokens that were computed and read from the cache, and
            those that were asked again with the cache skipped.
        began, ended: seconds of ``time.time``.
        error: why the row was not scored.
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


class _Aborted(Exception):
    """A request was aborted by a synchronisation of the weights."""


def read_answer(
    fields: Mapping[str, Any], prompt: Sequence[int], answer: Sequence[int], *, read_cache: bool
) -> list[float] | None:
    """Read the answer's log-probs from the end of a server's ``prompt_logprobs``; None: they cannot be trusted.

    Entry k is of the prompt's token k + 1, an entry that means nothing is last, and some engines leave out the first
    ones, so that it is read from the end. The answer's own ids have to stand there, and where the cache may have been
    read, the position before the answer has to be computed.

    Raises:
        ScoringError: the server returns no log-probs of prompts.
    """
    ids, log_probs = fields.get("prompt_ids"), fields.get("prompt_logprobs")
    if ids is None or log_probs is None:
        raise ScoringError("the rollout server's answer holds no prompt_logprobs.")
    count = len(answer)
    if [each[0] for each in ids[-count - 1 : -1]] != list(answer) or len(log_probs) != len(ids):
        return None
    if read_cache:
        cached = fields.get(CACHED)
        if cached is None or cached > len(prompt) - count - 1:
            return None
    found = [float(each[0]) for each in log_probs[-count - 1 : -1]]
    return found if all(math.isfinite(each) and each <= 1e-3 for each in found) else None


def find_boundaries(
    pieces: Sequence[str], mask: Sequence[int], response: Sequence[int], settings: ProcessSettings, eos: frozenset[int]
) -> list[int]:
    """Find the ends of a response's episodes, each behind a token that the policy sampled."""
    # A marker in a tool's output is none of the policy's.
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
    """Scores rows by a rollout server.

    Args:
        settings: of the run.
        generate: verl's client, the base class's method: the resuming one drops what is asked for.
        tokenizer: the policy's.
        reads_cache: the server says how much of a prompt it read from its cache.
        own_requests: the engine gets the request's own id, so that two may not have the same.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        generate: Generate,
        tokenizer: Any,
        *,
        reads_cache: bool = False,
        own_requests: bool = False,
    ) -> None:
        self._settings, self._generate, self._tokenizer = settings, generate, tokenizer
        self._reads_cache = reads_cache and settings.prefix_cache == "auto"
        self._own_requests = own_requests
        eos = tokenizer.eos_token_id
        self._eos = frozenset(eos if isinstance(eos, list) else [eos])

    async def score(self, row: Row) -> dict[str, Any]:
        """Score a row; as plain Python, with ``error`` set where it cannot be."""
        result = RowValues(began=time.time())
        try:
            await self._score(row, result)
        except Exception as error:
            # Raised here, it would fail the row's group, which verl pads away.
            kind = "" if isinstance(error, ScoringError | AnswerError) else f"{type(error).__name__}: "
            result.values, result.error = [], f"{kind}{error}"
        result.ended = time.time()
        return asdict(result)

    async def _score(self, row: Row, result: RowValues) -> None:
        settings = self._settings
        texts = read_answers(row.truth, settings.max_answers)
        answers = [tokenize_answer(self._tokenizer, settings.force_prompt, text) for text in texts]
        for text, forced in zip(texts, answers, strict=True):
            if len(forced.answer) > settings.max_answer_tokens:
                raise AnswerError(
                    f"the answer {text[:40]!r} has {len(forced.answer)} tokens, more than "
                    f"max_answer_tokens={settings.max_answer_tokens}."
                )
        pieces = list_pieces(self._tokenizer, row.response)
        result.ends = find_boundaries(pieces, row.mask, row.response, settings, self._eos)
        result.answers = [(list(forced.ids), len(forced.answer)) for forced in answers]
        seen: Counter[Any] = Counter()
        for _ in range(ROUNDS):
            seen.clear()
            asked = [self._value(row, end, answers, result, seen) for end in (0, *result.ends)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            failed = [each for each in found if isinstance(each, BaseException)]
            if any(not isinstance(each, _Aborted) for each in failed):
                raise next(each for each in failed if not isinstance(each, _Aborted))
            if failed:
                await asyncio.sleep(PAUSE)
            elif set(seen) == {row.version}:
                result.values = [value for value, _ in found]  # type: ignore[misc]
                result.best = [best for _, best in found]  # type: ignore[misc]
                result.version = row.version
                return
        versions = ", ".join(map(str, sorted(seen, key=str))) or "none, for its requests were aborted"
        raise ScoringError(f"its last token is of version {row.version}, and its values were of {versions}.")

    async def _value(
        self, row: Row, end: int, answers: Sequence[Forced], result: RowValues, seen: Counter[Any]
    ) -> tuple[float, int]:
        """Compute a prefix's value, of the likeliest answer, and which one that is."""
        prefix = [*row.prompt, *row.response[:end]]
        means = [await self._ask(row, prefix, forced, end > 0, result, seen) for forced in answers]
        best = max(range(len(means)), key=means.__getitem__)
        return max(means[best], self._settings.floor), best

    async def _ask(
        self, row: Row, prefix: list[int], forced: Forced, may_read: bool, result: RowValues, seen: Counter[Any]
    ) -> float:
        """Ask for the mean log-prob of the answer's tokens."""
        prompt = [*prefix, *forced.ids]
        # Siblings ask for the same V_0: there the answer itself would be cached.
        for read_cache in (True, False) if self._reads_cache and may_read else (False,):
            output = await self._generate(
                self._request_id(row), prompt_ids=prompt, sampling_params=build_sampling(read_cache)
            )
            result.requests += 1
            if output.stop_reason in ABORTED:
                raise _Aborted
            cached = output.extra_fields.get(CACHED) or 0
            result.cached += cached
            result.forward += len(prompt) - cached
            seen[output.extra_fields.get("global_steps")] += 1
            found = read_answer(output.extra_fields, prompt, forced.answer, read_cache=read_cache)
            if found is not None:
                return math.fsum(found) / len(found)
            result.rescored += 1
        raise ScoringError(
            f"the rollout server did not score the answer's {len(forced.answer)} tokens behind {len(prefix)} others."
        )

    def _request_id(self, row: Row) -> str:
        return uuid4().hex if row.request is None or self._own_requests else row.request


def build_sampling(read_cache: bool) -> dict[str, Any]:
    """Build vLLM's sampling parameters of a request that scores its prompt, at temperature 1."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 1,
        "prompt_logprobs": 0,
        # Ids at cached positions need not be in the vocabulary.
        "detokenize": False,
        "skip_reading_prefix_cache": not read_cache,
    }
