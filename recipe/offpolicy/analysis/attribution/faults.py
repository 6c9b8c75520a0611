"""Faults to mend before a bound is set: a bound chosen by a faulty run's mismatch fits the fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...recording import Rows, Step
from .causes import Cause, find_causes_in_rows, numerics, stale_weights
from .row_sample import RowSample
from .scored_rows import select_scored_rows

TOKENS = 400_000
"""Most tokens of the sample that is searched for causes."""


def has_stale_tokens(rows: Rows) -> bool:
    """Check whether a token is recorded as stale."""
    return bool((rows.token_staleness > 0)[rows.response_mask].any())


def has_unnoticed_staleness(causes: Iterable[Cause], *, stale: bool) -> bool:
    """Check whether stale weights were found although no token is recorded as ``stale``."""
    found = any(cause.name == stale_weights.NAME and cause.verdict == "present" for cause in causes)
    return found and not stale


def describe_faults(causes: Iterable[Cause], *, stale: bool) -> str:
    """Name the faults among ``causes`` in a sentence; empty where there is none.

    Numerics, and older weights whose age was noted, are what a correction is for.

    Args:
        stale: whether a token is recorded as stale.
    """
    causes = list(causes)
    meant = {numerics.NAME} if has_unnoticed_staleness(causes, stale=stale) else {numerics.NAME, stale_weights.NAME}
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
        self._sample = RowSample.of_steps(steps, TOKENS)
        self._kept: list[Step] = []

    def tee(self, parts: Iterable[Step]) -> Iterator[Step]:
        """Yield ``parts`` unchanged and keep a sample of their rows."""
        for part in parts:
            if len(chosen := self._sample.choose(part.rows)):
                self._kept.append(Step(part.rows.take(chosen), part.spec, part.reasons))
            yield part

    def describe_faults(self, card: Mapping[str, Any]) -> str:
        """Name the faults in the sampled rows, see ``faults.describe_faults``."""
        if not self._kept:
            return ""
        rows = select_scored_rows(self._kept).rows
        return describe_faults(find_causes_in_rows(rows, card), stale=has_stale_tokens(rows)) if len(rows) else ""
