"""verl's `custom_reward_function` of the task with free length: 1 if the last word is the answer, else 0.

verl loads this file by its path.
"""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Score an answer by its last word alone; what stands before it is as long as the policy likes."""
    words = solution_str.split()
    return float(bool(words) and words[-1].casefold() == ground_truth.casefold())
