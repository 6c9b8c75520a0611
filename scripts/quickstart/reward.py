"""verl's `custom_reward_function`: reasoning-gym's own scorer; verl loads this file by its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import reasoning_gym

_scorer = cache(reasoning_gym.get_score_answer_fn)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """Score one answer: ``score`` and ``acc``, 0 to 1 with credit for right letters, and ``exact``, 1 for all of them.

    The graded score hides a collapse: answers of the right letters in no order keep much of it. verl validates by each
    key, and shows ``acc`` among its core metrics.

    Args:
        data_source: "reasoning_gym/<family>".
        solution_str: the decoded answer; white space around it is not judged.
        ground_truth: the reference answer.
        extra_info: `question` and `metadata` (JSON), from which reasoning-gym's entry is rebuilt.

    Raises:
        ValueError: the data does not come from reasoning-gym.
    """
    library, _slash, family = data_source.partition("/")
    if library != "reasoning_gym" or not family:
        raise ValueError(f"data_source={data_source!r} is not 'reasoning_gym/<family>': this reward cannot score it")
    info = extra_info or {}
    metadata = json.loads(info.get("metadata") or "{}")
    entry = {"question": info.get("question", ""), "answer": ground_truth, "metadata": metadata}
    score = float(_scorer(family)(answer=solution_str.strip(), entry=entry))
    return {"score": score, "acc": score, "exact": float(score >= 1.0)}
