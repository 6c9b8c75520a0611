"""Brace expansion, ``{a,b}`` and ``{1..3}``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

Skip = Callable[[str, int], int]
"""Called with a word and a position; returns the position after the character, or after a quoted or bracketed piece."""
_SEQUENCE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.(-?\d+))?")


def expand_braces(word: str, skip: Skip) -> Iterator[str]:
    """Expand the braces of an unexpanded word, lazily; quoted braces are unchanged."""
    place = 0
    while place < len(word):
        if word[place] == "{" and (found := _read_brace(word, place, skip)) is not None:
            end, parts = found
            for part in parts:
                for rest in expand_braces(word[end:], skip):
                    yield word[:place] + part + rest
            return
        place = skip(word, place)
    yield word


def _read_brace(word: str, start: int, skip: Skip) -> tuple[int, Iterable[str]] | None:
    """Return the position after a brace and its expansion; None for a brace that bash leaves unchanged."""
    depth, place, cuts = 0, start, [start]
    while place < len(word):
        character = word[place]
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 1:
            cuts.append(place)
        if depth == 0:
            break
        place = skip(word, place)
    else:
        return None
    if len(cuts) == 1:
        sequence = _SEQUENCE.fullmatch(word, start + 1, place)
        return None if sequence is None else (place + 1, _count(sequence))
    parts = [word[cut + 1 : end] for cut, end in zip(cuts, [*cuts[1:], place], strict=True)]
    return place + 1, (each for part in parts for each in expand_braces(part, skip))


def _count(sequence: re.Match[str]) -> Iterable[str]:
    first, last, one, other, step = sequence.groups()
    ends = (int(first), int(last)) if first else (ord(one), ord(other))
    by = abs(int(step or 1)) or 1
    numbers = range(ends[0], ends[1] + 1, by) if ends[0] <= ends[1] else range(ends[0], ends[1] - 1, -by)
    if not first:
        return map(chr, numbers)
    width = max(len(first), len(last)) if re.search(r"^-?0\d", first) or re.search(r"^-?0\d", last) else 0
    return (f"{number:0{width}d}" for number in numbers)
