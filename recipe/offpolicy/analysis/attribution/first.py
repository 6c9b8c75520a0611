"""Faults that are to be mended before a bound is chosen: one that is set by their mismatch fits the fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ...recording import Rows, Step
from .causes import Cause, find_in, numerics, stale
from .scored import scored

TOKENS, STEPS = 400_000, 64
"""That are kept of a recording to look for causes in."""


def unnoticed_staleness(causes: Iterable[Cause], rows: Rows) -> bool:
    """Whether older weights were found in rows of which none is noted to be stale."""
    found = any(cause.name == stale.NAME and cause.verdict == "present" for cause in causes)
    return found and not bool((rows.staleness > 0).any())


def mend_first(causes: Iterable[Cause], rows: Rows) -> str:
    """A sentence that names the faults among ``causes``; empty where there is none.

    Numerics, and older weights whose age was noted, are what a correction is for.
    """
    causes = list(causes)
    meant = {numerics.NAME} if unnoticed_staleness(causes, rows) else {numerics.NAME, stale.NAME}
    faults = [cause for cause in causes if cause.verdict == "present" and cause.name not in meant]
    if not faults:
        return ""
    named = "; ".join(f"{cause.name} ({cause.fix})" if cause.fix else cause.name for cause in faults)
    return (
        f"The mismatch has a cause that is to be mended first: {named}. A bound that is set by this recording fits "
        f"that cause, not the run without it."
    )


class Screen:
    """Keeps part of a recording's rows while somebody else reads it, to look for faults in.

    Args:
        steps: of the recording.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        places = np.linspace(0, len(steps) - 1, min(len(steps), STEPS)).round().astype(int)
        self._steps = {steps[place] for place in places}
        self._tokens = TOKENS // max(len(self._steps), 1)
        self._kept: list[Step] = []

    def watching(self, parts: Iterable[Step]) -> Iterator[Step]:
        """The same ``parts``."""
        for part in parts:
            if len(part.rows) and int(part.rows.step[0]) in self._steps:
                chosen = _some(part.rows, self._tokens)
                self._kept.append(Step(part.rows.take(chosen), part.spec, part.reasons))
            yield part

    def mend_first(self, card: Mapping[str, Any]) -> str:
        """See the function of that name; of what was watched."""
        if not self._kept:
            return ""
        found = scored(self._kept)
        return mend_first(find_in(found.rows, card), found.rows) if len(found.rows) else ""


def _some(rows: Rows, tokens: int) -> NDArray[np.int64]:
    """Rows of some prompts, of the same ones in every step, up to ``tokens``; one prompt at the least."""
    bounds = zip(rows.prompt_offsets[:-1], rows.prompt_offsets[1:], rows.uid, strict=True)
    drawn = np.array([crc32(rows.prompt_ids[a:b].tobytes() or str(uid).encode()) for a, b, uid in bounds])
    _, of_row = np.unique(drawn, return_inverse=True)
    ends = np.cumsum(np.bincount(of_row, weights=np.diff(rows.offsets)))
    return np.flatnonzero(of_row < max(int((ends <= tokens).sum()), 1))
