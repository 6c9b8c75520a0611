"""verl's `custom_reward_function` of the arithmetic task: reasoning-gym's own score of an answer's last number.

verl loads this file by its path.
"""

from __future__ import annotations

import re
from typing import Any

import reasoning_gym

_score = reasoning_gym.get_score_answer_fn("chain_sum")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Score 1 if the last number of an answer is the result, else 0."""
    numbers = re.findall(r"-?\d+", solution_str)
    return float(bool(numbers) and _score(answer=numbers[-1], entry={"answer": ground_truth}) >= 1.0)
