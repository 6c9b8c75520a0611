"""The last step in which each prompt may be trained, and whether all that wait can keep theirs."""

from __future__ import annotations

from collections.abc import Iterable


def keeps_deadlines(due: Iterable[float], *, step: int, batch: int, left: int) -> bool:
    """Return True if all prompts that wait are trained in time when they are handed out in this order.

    Args:
        due: last step in which each prompt may be trained, in the order of their issue.
        step: the running one.
        batch: prompts that each further step trains.
        left: prompts that this step still trains.
    """
    return all(place <= left + max(last - step, 0) * batch for place, last in enumerate(due, 1))
