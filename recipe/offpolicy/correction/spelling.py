"""The name that a misspelled word was meant for: one answer to "did you mean" for keys, options and choices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CLOSE = 0.8


def find_closest(word: str, known: Iterable[str], cutoff: float = _CLOSE) -> str | None:
    """Find the known name that a word was meant for; None if it resembles none.

    Case, ``_``, ``-`` and a plural s do not count; letters may be swapped, and at least ``cutoff`` of them agree.

    Example:
        >>> find_closest("ice_pop", ["icepop", "gsm"]), find_closest("gms", ["icepop", "gsm"])
        ('icepop', 'gsm')
        >>> find_closest("x", ["icepop", "gsm"])
    """
    names = list(known)
    bare = {_strip(name): name for name in reversed(names)}
    given = _strip(word)
    if word in names or given in bare:
        return word if word in names else bare[given]
    swapped = [name for stripped, name in bare.items() if sorted(stripped) == sorted(given)]
    near = [bare[each] for each in difflib.get_close_matches(given, bare, 1, cutoff)]
    return next(iter([*swapped, *near]), None)


def _strip(word: str) -> str:
    plain = word.lower().replace("_", "").replace("-", "")
    return plain.removesuffix("s") if len(plain) > 2 else plain
