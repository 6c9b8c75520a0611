"""Faults to mend before a bound is set: a bound chosen by a faulty run's mismatch fits the fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ...recording import Rows, Step
from .causes import Cause, find_causes_in_rows, numerics, stale_weights
from .scored_rows import select_scored_rows

TOKENS, STEPS = 400_000, 64
"""Most tokens, and steps, of the sample that is searched for causes."""


def has_unnoticed_staleness(causes: Iterable[Cause], rows: Rows) -> bool:
    """Check whether stale weights were found although no token is recorded as stale."""
    found = any(cause.name == stale_weights.NAME and cause.verdict == "present" for cause in causes)
    return found and not bool((rows.token_staleness > 0)[rows.response_mask].any())


def describe_faults(causes: Iterable[Cause], rows: Rows) -> str:
    """Name the faults among ``causes`` in a sentence; empty where there is none.

    Numerics, and older weights whose age was noted, are what a correction is for.
    """
    causes = list(causes)
    meant = {numerics.NAME} if has_unnoticed_staleness(causes, rows) else {numerics.NAME, stale_weights.NAME}
    faults = [cause for cause in causes if cause.verdict == "present" and cause.name not in meant]
    if not faults:
        return ""
    named = "; ".join(f"{cause.name} ({cause.fix})" if cause.fix else cause.name for cause in faults)
    return (
        f"The mismatch has a cause that is to be mended first: {named}. A bound that is set by this recording fits "
        f"that cause, not the run without it."
    )


class FaultScreen:
    """Sampler of a recording's rows that looks for faults while another reader consumes the recording.

    Args:
        steps: of the recording.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        places = np.linspace(0, len(steps) - 1, min(len(steps), STEPS)).round().astype(int)
        self._steps = {steps[place] for place in places}
        self._tokens = TOKENS // max(len(self._steps), 1)
        self._kept: list[Step] = []

    def tee(self, parts: Iterable[Step]) -> Iterator[Step]:
        """Yield ``parts`` unchanged and keep a sample of their rows."""
        for part in parts:
            if len(part.rows) and int(part.rows.step[0]) in self._steps:
                chosen = _some(part.rows, self._tokens)
                self._kept.append(Step(part.rows.take(chosen), part.spec, part.reasons))
            yield part

    def describe_faults(self, card: Mapping[str, Any]) -> str:
        """Name the faults in the sampled rows, see ``faults.describe_faults``."""
        if not self._kept:
            return ""
        found = select_scored_rows(self._kept)
        return describe_faults(find_causes_in_rows(found.rows, card), found.rows) if len(found.rows) else ""


def _some(rows: Rows, tokens: int) -> NDArray[np.int64]:
    """Choose the rows of some prompts, the same ones in every step, up to ``tokens``; at least one prompt."""
    bounds = zip(rows.prompt_offsets[:-1], rows.prompt_offsets[1:], rows.uid, strict=True)
    # A hash of the prompt draws the same prompts in every step, without state between the steps.
    drawn = np.array([crc32(rows.prompt_ids[a:b].tobytes() or str(uid).encode()) for a, b, uid in bounds])
    _, of_row = np.unique(drawn, return_inverse=True)
    ends = np.cumsum(np.bincount(of_row, weights=np.diff(rows.offsets)))
    return np.flatnonzero(of_row < max(int((ends <= tokens).sum()), 1))
