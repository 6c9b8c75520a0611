"""What a run's outcome is worth, and the exit code that says so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from metrics import History

REQUIRED_RISE = 0.1


class Exit(IntEnum):
    """Exit codes of scripts/quickstart.sh; an interrupted run ends with 128 + the signal's number."""

    OK = 0
    FAILED = 1
    REFUSED = 2
    NOT_RISEN = 3
    NOT_LIVE = 4
    TIME_LIMIT = 5
    STALLED = 6


@dataclass(frozen=True)
class Verdict:
    code: Exit
    sentence: str


def judge(history: History, *, corrected: bool, judged: bool, scored: bool = True) -> Verdict:
    """Judges a run that ended by itself.

    Args:
        corrected: a correction is configured, so its proof of life must be there.
        judged: the score must have risen by REQUIRED_RISE; False for fewer steps or another model than ours.
        scored: the held-out score was asked for, before training and after it.
    """
    if not history.steps:
        return Verdict(Exit.FAILED, "training ended without a step")
    if scored and len(history.heldout) < 2:
        return Verdict(Exit.FAILED, "training ended without the held-out score before and after it")
    if corrected and not history.proved:
        return Verdict(Exit.NOT_LIVE, "the correction was not proved live: offpolicy/live/proved is not 1")
    if not scored:
        return Verdict(Exit.OK, f"trained {len(history.steps)} steps (not judged: validation is switched off)")
    before, after = history.heldout[0][1], history.heldout[-1][1]
    change = f"the held-out score went from {before:.3f} to {after:.3f}"
    if not judged:
        return Verdict(Exit.OK, f"{change} (not judged: fewer steps than the default, or another model)")
    if after - before < REQUIRED_RISE:
        return Verdict(Exit.NOT_RISEN, f"{change}, less than the rise of {REQUIRED_RISE} that is asked for")
    return Verdict(Exit.OK, change)
