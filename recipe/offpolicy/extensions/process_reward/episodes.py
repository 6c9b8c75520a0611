"""Answers and episodes of a row: token ids of force prompt and answer, and where the response's episodes end."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np

COLUMN = "reward_model.ground_truth"
"""Column of the data set that contains the answer."""


class ScoringError(ValueError):
    """A row cannot be scored; the message says why."""


def read_answers(row: Any, most: int) -> list[str]:
    """Read the answers in a row's ``reward_model`` column: a text, a number, or several alternatives.

    Raises:
        ScoringError: there is no answer, or there are more than ``most``.
    """
    truth: Any = row.get("ground_truth") if hasattr(row, "get") else None
    # Values read from Parquet are numpy arrays.
    truth = truth[()] if isinstance(truth, np.ndarray) else truth
    given = list(truth) if isinstance(truth, list | tuple | np.ndarray) else [truth]
    answers = [_write(each) for each in given if each is not None and not isinstance(each, dict)]
    if not answers or not all(answers):
        raise ScoringError(f"the column {COLUMN} contains no answer: {truth!r}.")
    if len(answers) > most:
        raise ScoringError(f"the column {COLUMN} contains {len(answers)} answers, more than max_answers={most}.")
    return answers


def _write(answer: Any) -> str:
    """Format an answer as in a response: numbers without ".0" or an exponent, texts without surrounding spaces.

    Raises:
        ScoringError: the answer is a number that is not finite.
    """
    if isinstance(answer, float | np.floating | Decimal):
        if not math.isfinite(answer):
            raise ScoringError(f"the column {COLUMN} contains {answer}, which is not an answer.")
        if isinstance(answer, Decimal):
            return f"{answer.normalize():f}"
        # numpy writes a float32 of 0.1 as "0.1"; converted to a Python float, it would have more digits.
        return np.format_float_positional(answer if answer else 0.0, trim="-")
    return str(answer).strip()


def tokenize_answer(tokenizer: Any, force_prompt: str, answer: str) -> tuple[list[int], int]:
    """Tokenise force prompt and answer together, because a token such as " 42" also contains the prompt's last space.

    Returns:
        The ids, and how many ids at the end overlap the answer's characters.

    Raises:
        ScoringError: no token contains the answer.
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
        raise ScoringError(f"no token of {text!r} contains the answer {answer!r}.")
    return ids, len(ids) - behind[0]


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
    """Find the first of ``texts`` that differs from its tokens when they are decoded one by one; None if none differs.

    Only ASCII is compared, because a token may be part of a non-ASCII character and cannot be decoded alone.
    """
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        one, other = (
            each.encode("ascii", "ignore").lstrip() for each in ("".join(list_pieces(tokenizer, ids)), str(whole))
        )
        if one != other:
            return text
    return None


STOPS = (".", "!", "?", "。", "！", "？", "\n")
"""Characters that end a sentence, unless a digit follows directly."""


def episode_ends(
    pieces: Sequence[str], *, markers: Sequence[str], max_tokens: int, max_episodes: int | None = None
) -> list[int]:
    """Find the exclusive ends of the episodes; the last end is ``len(pieces)``. Empty if there are no tokens.

    An episode begins at the token that contains a marker's first character, unless a letter precedes the marker. Longer
    episodes are split after the last sentence that fits, or at ``max_tokens`` if no sentence ends.

    Args:
        pieces: text of each token of the region, which stops before the end-of-thinking marker.
        markers: texts that begin an episode; case-sensitive.
        max_tokens: maximum length of an episode, before episodes are joined.
        max_episodes: if there are more episodes, neighbouring ones are joined evenly, keeping the first end; None: no
            limit.

    Example:
        >>> episode_ends(["3", "+", "3", ".", " So", " 1", "."], markers=["So "], max_tokens=4)
        [4, 7]
    """
    if not pieces:
        return []
    text = "".join(pieces)
    # Start of each token; the last entry is the length of the text.
    starts = list(itertools.accumulate(map(len, pieces), initial=0))
    begins = sorted({bisect_right(starts, place) - 1 for place in _find_markers(text, markers)} - {0})
    stops = _find_sentence_ends(text, starts)
    pairs = itertools.pairwise([0, *begins, len(pieces)])
    ends = [part for begin, end in pairs for part in _split(begin, end, stops, max_tokens)]
    if max_episodes is None or len(ends) <= max_episodes:
        return ends
    if max_episodes == 1:
        return ends[-1:]
    return [ends[place * (len(ends) - 1) // (max_episodes - 1)] for place in range(max_episodes)]


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
    return [
        token
        for token, (before, place) in enumerate(itertools.pairwise(starts), 1)
        if place > before
        and text[max(place - 8, 0) : place].rstrip(" \t").endswith(STOPS)
        and not text[place : place + 1].isdigit()
    ]


def _split(begin: int, end: int, stops: Sequence[int], max_tokens: int) -> Iterator[int]:
    """Yield the ends of an episode's parts."""
    while end - begin > max_tokens:
        last = bisect_right(stops, begin + max_tokens) - 1
        begin = stops[last] if last >= 0 and stops[last] > begin else begin + max_tokens
        yield begin
    yield end


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
