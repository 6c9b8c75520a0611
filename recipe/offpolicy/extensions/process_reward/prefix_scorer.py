"""Values of prefixes, requested from the rollout server right after a row's last token, under the same weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

from .answer import AnswerError, Forced, list_pieces, read_answers, tokenize_answer
from .episodes import episode_ends, find_region
from .settings import ProcessSettings
from .tail_scores import Tail, TailScores

ROUNDS = 3
"""Number of times that a row's values are requested, until all have one version, that of its last token."""
PAUSE = 1.0
"""Seconds before a row is scored again after an abort, like verl's resuming client."""


class ScoringError(RuntimeError):
    """The rollout engine did not score a prefix as required."""


AskServer = Callable[[str, Sequence[int], Sequence[Tail], bool], Awaitable[TailScores]]
"""Call of ``score_tails`` on the server that a request's id is routed to: (request_id, row, tails, read_cache)."""


@dataclass(frozen=True)
class Row:
    """A sampled row.

    Attributes:
        prompt, response: token ids.
        mask: of the response, 1 on tokens that the policy sampled.
        truth: the row's ``reward_model`` column.
        version: version of the weights that sampled its last token; None if the server does not report it.
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
    """Values of one row, as sent with it.

    Attributes:
        ends: ends of its episodes, exclusive.
        values: V_0..V_m; empty for a row that was not scored.
        version: version of the weights with which all of them were computed.
        answers: (ids of force prompt and answer, number of the answer's ids) of each alternative.
        best: the alternative of each value.
        requests, forward, cached, rescored: number of requests, of their tokens that were computed and read from the
            cache, and of requests repeated without the cache.
        began, ended: seconds of ``time.time``.
        error: why the row was not scored.
        monte_carlo: the ``number`` of a prefix with the result of ``monte_carlo.continue_prefix``; None: no check.
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
    # A marker in a tool's output is not the policy's.
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
        settings: settings of the run.
        ask: calls the server.
        tokenizer: the policy's.
    """

    def __init__(self, settings: ProcessSettings, ask: AskServer, tokenizer: Any) -> None:
        self._settings, self._ask, self._tokenizer = settings, ask, tokenizer
        eos = tokenizer.eos_token_id
        self._eos = frozenset(eos if isinstance(eos, list) else [eos])

    async def score(self, row: Row) -> dict[str, Any]:
        """Score a row; returns plain Python, with ``error`` set if it cannot be scored."""
        result = RowValues(began=time.time())
        try:
            await self._score(row, result)
        except Exception as error:
            # Raised here, it would fail the row's group, which verl replaces by padding.
            kind = "" if isinstance(error, ScoringError | AnswerError) else f"{type(error).__name__}: "
            result.values, result.error = [], f"{kind}{error}"
        result.ended = time.time()
        return asdict(result)

    async def _score(self, row: Row, result: RowValues) -> None:
        settings = self._settings
        answers = self._tokenize(row)
        pieces = list_pieces(self._tokenizer, row.response)
        result.ends = find_boundaries(pieces, row.mask, row.response, settings, self._eos)
        result.answers = [(list(forced.ids), len(forced.answer)) for forced in answers]
        ids = [*row.prompt, *row.response]
        # Siblings request the same V_0, for which the answer itself would be cached.
        tails = [
            Tail(len(row.prompt) + end, tuple(forced.ids), len(forced.answer), may_read=end > 0)
            for end in (0, *result.ends)
            for forced in answers
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
        raise ScoringError(f"its last token has version {row.version}, but its values have {shown}.")

    def _tokenize(self, row: Row) -> list[Forced]:
        """Tokenise force prompt and answer, once for each alternative."""
        settings = self._settings
        texts = read_answers(row.truth, settings.max_answers)
        answers = [tokenize_answer(self._tokenizer, settings.force_prompt, text) for text in texts]
        for text, forced in zip(texts, answers, strict=True):
            if len(forced.answer) > settings.max_answer_tokens:
                raise AnswerError(
                    f"the answer {text[:40]!r} has {len(forced.answer)} tokens, more than "
                    f"max_answer_tokens={settings.max_answer_tokens}."
                )
        return answers

    def _fill(self, result: RowValues, tails: Sequence[Tail], means: Sequence[float | None]) -> None:
        """Select each prefix's value, that of the likeliest answer, and record the answer."""
        for tail, mean in zip(tails, means, strict=True):
            if mean is None:
                raise ScoringError(
                    f"the rollout server did not score the {tail.answer} tokens of the answer after {tail.end} others."
                )
        alternatives = len(result.answers)
        for first in range(0, len(means), alternatives):
            found = [mean for mean in means[first : first + alternatives] if mean is not None]
            best = max(range(alternatives), key=found.__getitem__)
            result.values.append(max(found[best], self._settings.floor))
            result.best.append(best)
