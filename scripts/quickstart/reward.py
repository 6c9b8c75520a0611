"""verl's `custom_reward_function` for each task; verl loads this file by its path, outside its package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import reasoning_gym

_scorer = cache(reasoning_gym.get_score_answer_fn)


FORCE_PROMPT = "</think>\n\nThe answer is "


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> float | dict[str, float]:
    """Score one answer by the kind of its question: a chain of sums, a sum of two digits, or a word.

    Args:
        data_source: "sums" or "reasoning_gym/<family>".
        solution_str: the decoded answer; white space around it is not judged.
        ground_truth: the reference answer.
        extra_info: `question` and `metadata` (JSON), from which reasoning-gym's entry is rebuilt.

    Raises:
        ValueError: the data comes from another source.
    """
    if data_source == "sums":
        return score_chain(solution_str, ground_truth)
    library, _slash, family = data_source.partition("/")
    if library != "reasoning_gym" or not family:
        raise ValueError(f"data_source={data_source!r} is not 'reasoning_gym/<family>': this reward cannot score it")
    if family == "chain_sum":
        return score_last_number(solution_str, ground_truth)
    info = extra_info or {}
    metadata = json.loads(info.get("metadata") or "{}")
    entry = {"question": info.get("question", ""), "answer": ground_truth, "metadata": metadata}
    return grade(family, solution_str, entry)


def grade(family: str, answer: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """Score by reasoning-gym: ``score`` and ``acc`` give partial credit for letters, and ``exact`` is 0 or 1.

    The graded score hides a collapse, because answers with the right letters in random order still get partial credit.
    verl reports each key in validation, and shows ``acc`` among its core metrics.
    """
    score = float(_scorer(family)(answer=answer.strip(), entry=entry))
    return {"score": score, "acc": score, "exact": float(score >= 1.0)}


def score_last_number(answer: str, ground_truth: str) -> float:
    """Score 1 if reasoning-gym's own scorer accepts the last number, otherwise 0."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and _scorer("chain_sum")(answer=numbers[-1], entry={"answer": ground_truth}) >= 1.0)


def score_chain(answer: str, ground_truth: str) -> float:
    """Score 1 if the text after the force prompt is the sum, otherwise 0."""
    _chain, found, last = answer.partition(FORCE_PROMPT.strip())
    return float(bool(found) and last.strip() == ground_truth)


def score_last_word(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Score 1 if the last word is the answer, otherwise 0; the text before it may have any length."""
    words = solution_str.split()
    return float(bool(words) and words[-1].casefold() == ground_truth.casefold())
