"""Values of prefixes at the ends of episodes, requested from the rollout server under the same weights."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import uuid4

import numpy as np

from .settings import ProcessSettings
from .tail_scores import Tail, TailScores

COLUMN = "reward_model.ground_truth"
"""Column of the data set that contains the answer."""


class AnswerError(ValueError):
    """An answer cannot be scored; the message says why."""


@dataclass(frozen=True)
class Forced:
    """Ids that are forced after a prefix.

    Attributes:
        ids: ids of the force prompt with the answer.
        answer: number of last ids that overlap the answer's characters.
    """

    ids: tuple[int, ...]
    answer: tuple[int, ...]


def read_answers(row: Any, most: int) -> list[str]:
    """Read the answers in a row's ``reward_model`` column: an expression as text, a number, or several alternatives.

    Raises:
        AnswerError: there is no answer, or there are more than ``most``.
    """
    truth: Any = row.get("ground_truth") if hasattr(row, "get") else None
    # Values read from Parquet are numpy arrays.
    truth = truth[()] if isinstance(truth, np.ndarray) else truth
    given = list(truth) if isinstance(truth, list | tuple | np.ndarray) else [truth]
    answers = [_write(each) for each in given if each is not None and not isinstance(each, dict)]
    if not answers or not all(answers):
        raise AnswerError(f"the column {COLUMN} holds no answer: {truth!r}.")
    if len(answers) > most:
        raise AnswerError(f"the column {COLUMN} holds {len(answers)} answers, more than max_answers={most}.")
    return answers


def _write(answer: Any) -> str:
    """Format an answer as in a response: numbers without a trailing ".0" or an exponent, texts without outer spaces.

    Raises:
        AnswerError: the answer is a number that is not finite.
    """
    if isinstance(answer, float | np.floating | Decimal):
        if not math.isfinite(answer):
            raise AnswerError(f"the column {COLUMN} holds {answer}, which is not an answer.")
        if isinstance(answer, Decimal):
            return f"{answer.normalize():f}"
        # A float32 of 0.1 is written "0.1"; converted to a Python float, it would have more digits.
        return np.format_float_positional(answer if answer else 0.0, trim="-")
    return str(answer).strip()


def tokenize_answer(tokenizer: Any, force_prompt: str, answer: str) -> Forced:
    """Tokenise force prompt and answer together, because a token such as " 42" also contains the prompt's last space.

    Raises:
        AnswerError: no token contains the answer.
    """
    text = force_prompt + answer
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, ends = list(found["input_ids"]), [end for _, end in found["offset_mapping"]]
    else:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        ends = list(itertools.accumulate(map(len, list_pieces(tokenizer, ids))))
    behind = [place for place, end in enumerate(ends) if end > len(force_prompt)]
    if not behind:
        raise AnswerError(f"no token of {text!r} holds the answer {answer!r}.")
    return Forced(tuple(ids), tuple(ids[behind[0] :]))


def list_pieces(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """List the text of each token."""
    return [_decode(tokenizer, int(each)) for each in ids]


@lru_cache(maxsize=1 << 18)
def _decode(tokenizer: Any, token: int) -> str:
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    # For a single token, sentencepiece's decoder drops the leading space.
    name = tokenizer.convert_ids_to_tokens(token)
    return f" {text}" if isinstance(name, str) and name.startswith("▁") and not text.startswith(" ") else text


def find_unlike_pieces(tokenizer: Any, texts: Sequence[str]) -> str | None:
    """Find the first of ``texts`` that differs from its tokens decoded one by one; None if there is no such text.

    Only ASCII is compared, because a token may be part of a non-ASCII character, which is not text on its own.
    """
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if _keep_ascii("".join(list_pieces(tokenizer, ids))) != _keep_ascii(str(whole)):
            return text
    return None


def _keep_ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode().lstrip()


STOPS = (".", "!", "?", "。", "！", "？", "\n")
"""Characters that end a sentence, unless a digit follows directly."""


def episode_ends(
    pieces: Sequence[str], *, markers: Sequence[str], max_tokens: int, max_episodes: int | None = None
) -> list[int]:
    """Find the exclusive ends of the episodes, the last of which is ``len(pieces)``; empty if there are no tokens.

    An episode begins at the token that contains a marker's first character, unless a letter precedes the marker. Longer
    episodes are split after the last sentence that fits, or at ``max_tokens`` if no sentence ends.

    Args:
        pieces: text of each token of the region, which stops before the end-of-thinking marker.
        markers: texts that begin an episode; case-sensitive.
        max_tokens: limit of an episode, before episodes are joined.
        max_episodes: limit above which neighbouring episodes are joined evenly, keeping the first end; None: no limit.

    Raises:
        ValueError: a limit is below 1, or a marker is empty.

    Example:
        >>> episode_ends(["3", "+", "3", ".", " So", " 1", "."], markers=["So "], max_tokens=4)
        [4, 7]
    """
    if max_tokens < 1 or (max_episodes is not None and max_episodes < 1):
        raise ValueError(f"max_tokens={max_tokens}, max_episodes={max_episodes}: expected 1 or more.")
    if not all(markers):
        raise ValueError("an empty marker would begin an episode at every token.")
    if not pieces:
        return []
    text = "".join(pieces)
    # Start of each token; the last entry is the length of the text.
    starts = list(itertools.accumulate(map(len, pieces), initial=0))
    begins = sorted({bisect_right(starts, place) - 1 for place in _find_markers(text, markers)} - {0})
    stops = _find_sentence_ends(text, starts)
    ends: list[int] = []
    for begin, end in itertools.pairwise([0, *begins, len(pieces)]):
        ends += _split(begin, end, stops, max_tokens)
    return ends if max_episodes is None else _join(ends, max_episodes)


def _find_markers(text: str, markers: Iterable[str]) -> Iterator[int]:
    """Find the characters at which a marker begins."""
    for marker in markers:
        place = text.find(marker)
        while place >= 0:
            if place == 0 or not text[place - 1].isalpha():
                yield place
            place = text.find(marker, place + 1)


def _find_sentence_ends(text: str, starts: Sequence[int]) -> list[int]:
    """Find the tokens that directly follow the end of a sentence, in order."""
    found = []
    for token in range(1, len(starts)):
        place = starts[token]
        before = text[:place] if place < 8 else text[place - 8 : place]
        follows = text[place : place + 1]
        if place > starts[token - 1] and before.rstrip(" \t").endswith(STOPS) and not follows.isdigit():
            found.append(token)
    return found


def _split(begin: int, end: int, stops: Sequence[int], max_tokens: int) -> Iterator[int]:
    """Yield the ends of an episode's parts."""
    while end - begin > max_tokens:
        last = bisect_right(stops, begin + max_tokens) - 1
        begin = stops[last] if last >= 0 and stops[last] > begin else begin + max_tokens
        yield begin
    yield end


def _join(ends: list[int], most: int) -> list[int]:
    """Keep ``most`` of the ends, evenly spaced, including the first and the last."""
    if len(ends) <= most:
        return ends
    if most == 1:
        return ends[-1:]
    return [ends[place * (len(ends) - 1) // (most - 1)] for place in range(most)]


def find_region(pieces: Sequence[str], think_end: str) -> int:
    """Count the tokens before the token in which ``think_end`` begins, or all tokens if ``think_end`` is missing.

    Example:
        >>> find_region(["2", ".", "</", "think", ">", "4"], "</think>")
        2
    """
    place = "".join(pieces).find(think_end) if think_end else -1
    if place < 0:
        return len(pieces)
    return bisect_right(list(itertools.accumulate(map(len, pieces), initial=0)), place) - 1


ROUNDS = 3
"""Largest number of attempts to obtain all of a row's values with the weights that sampled its last token."""
PAUSE = 1.0
"""Seconds before a row is scored again after an abort, as in verl's resuming client."""


class ScoringError(RuntimeError):
    """The rollout engine did not score a prefix as required."""


AskServer = Callable[[str, Sequence[int], Sequence[Tail], bool], Awaitable[TailScores]]
"""Calls ``score_tails`` on the server that a request's id is routed to: (request_id, row, tails, read_cache)."""


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
    """Values of one row, as sent together with the row.

    Attributes:
        ends: ends of the row's episodes, exclusive.
        values: V_0..V_m; empty for a row that was not scored.
        version: version of the weights with which all values were computed.
        answers: (ids of force prompt and answer, number of the answer's ids) of each alternative.
        best: the alternative of each value.
        requests, forward, cached, rescored: number of requests, of tokens computed for them, of tokens read from the
            cache for them, and of requests repeated without the cache.
        began, ended: seconds of ``time.time``.
        error: the reason why the row was not scored.
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
        """Score a row; return plain Python, with ``error`` set if the row cannot be scored."""
        result = RowValues(began=time.time())
        try:
            await self._score(row, result)
        except Exception as error:
            # If an exception were raised here, verl would replace the row's group with padding.
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
        # Siblings request the same V_0, so the answer itself would be cached.
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
        """Set each prefix's value to the value of the likeliest answer, and record which answer this is."""
        for tail, mean in zip(tails, means, strict=True):
            if mean is None:
                raise ScoringError(
                    f"the rollout server did not score the {tail.answer} tokens of the answer that follow the "
                    f"first {tail.end} tokens."
                )
        alternatives = len(result.answers)
        for first in range(0, len(means), alternatives):
            found = [mean for mean in means[first : first + alternatives] if mean is not None]
            best = max(range(alternatives), key=found.__getitem__)
            result.values.append(max(found[best], self._settings.floor))
            result.best.append(best)
