"""Episodes of a response: pieces of reasoning that begin at markers such as "Wait," and have a limited length."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

STOPS = (".", "!", "?", "。", "！", "？", "\n")
"""Characters that end a sentence, unless a digit follows directly."""


def episode_ends(
    pieces: Sequence[str], *, markers: Sequence[str], max_tokens: int, max_episodes: int | None = None
) -> list[int]:
    """Find the ends of the episodes, each exclusive, the last one ``len(pieces)``; empty without tokens.

    An episode begins at the token that holds a marker's first character, unless a letter precedes it. Longer episodes
    are split after the last sentence that fits, or at ``max_tokens`` if no sentence ends.

    Args:
        pieces: text of each token of the region, which ends before the end of thinking.
        markers: texts that begin an episode; case-sensitive.
        max_tokens: limit of an episode, before episodes are joined.
        max_episodes: limit above which neighbours are joined evenly, keeping the first end; None: no limit.

    Raises:
        ValueError: a limit below 1, or an empty marker.

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
    """Find the tokens before which a sentence ends, in order."""
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
    """Keep ``most`` of the ends, evenly, the first and the last among them."""
    if len(ends) <= most:
        return ends
    if most == 1:
        return ends[-1:]
    return [ends[place * (len(ends) - 1) // (most - 1)] for place in range(most)]


def find_region(pieces: Sequence[str], think_end: str) -> int:
    """Find the number of tokens before the one with the first character of ``think_end``; all tokens if it is missing.

    Example:
        >>> find_region(["2", ".", "</", "think", ">", "4"], "</think>")
        2
    """
    place = "".join(pieces).find(think_end) if think_end else -1
    if place < 0:
        return len(pieces)
    return bisect_right(list(itertools.accumulate(map(len, pieces), initial=0)), place) - 1
