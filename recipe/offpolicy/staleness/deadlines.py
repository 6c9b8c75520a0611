"""The last step in which each prompt may be trained, and whether all that wait can keep theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def keeps_deadlines(issued: Iterable[int], *, step: int, oldest_age: int, batch: int, left: int) -> bool:
    """Return True if all prompts that wait can be trained in time.

    A prompt that was issued in step t may be trained until step t + ``oldest_age``. Training the oldest first keeps
    every deadline that can be kept.

    Args:
        issued: step of each prompt that waits.
        step: the running one.
        batch: prompts that each further step trains.
        left: prompts that this step still trains.
    """
    by_step, due = Counter(issued), 0
    for each in sorted(by_step):
        due += by_step[each]
        if due > left + max(each + oldest_age - step, 0) * batch:
            return False
    return True
