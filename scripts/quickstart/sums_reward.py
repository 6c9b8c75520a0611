"""verl's `custom_reward_function` of the sums; verl loads this file by its path, outside its package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORCE_PROMPT = "</think>\n\nThe answer is "


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> float:
    """Score one answer: 1 if what follows the force prompt is the sum, else 0; verl's ``custom_reward_function``."""
    _chain, found, answer = solution_str.partition(FORCE_PROMPT.strip())
    return float(bool(found) and answer.strip() == ground_truth)
