"""The last step in which each prompt may be trained, and whether all waiting prompts can meet it."""

from __future__ import annotations

from collections.abc import Iterable


def keeps_deadlines(due: Iterable[float], *, step: int, batch: int, left: int) -> bool:
    """Return True if all waiting prompts are trained in time when they are handed out in this order.

    Args:
        due: last step in which each prompt may be trained, in the order of their issue.
        step: the current step.
        batch: number of prompts that each further step trains.
        left: number of prompts that this step still trains.
    """
    return all(place <= left + max(last - step, 0) * batch for place, last in enumerate(due, 1))
