"""The task with answers of free length: words are spelt backward after any number of copies."""

from __future__ import annotations

import random
from typing import Any

REPEATS, BASE, SLOPE = 6, 0.2, 0.15
MOST_TOKENS = 56
"""Most tokens of an answer: seven words of up to six letters, with separators."""
COEFFICIENTS = {"uniform": 2e-3, "group": 0.1, "anchor": 0.1}
"""Coefficients of length penalties on this task; with uniform, an answer of ``MOST_TOKENS`` loses 0.11."""
ANCHOR = {"per": "source", "pass_rate": 0.4, "min_samples": 64}
"""Keys of ``length_penalty.anchor``: prompts repeat too rarely for their own anchors, and few are solved at first."""


def demonstrate_at_length(entry: dict[str, Any], rng: random.Random) -> str:
    """Sample an answer: 0 to 6 copies of the word, then the word backward or unchanged.

    It is right with probability 0.2 + 0.15 for each copy, so a model that learns from these prefers longer answers.
    """
    copies = rng.randint(0, REPEATS)
    word = entry["metadata"]["word"]
    last = entry["answer"] if rng.random() < BASE + SLOPE * copies else word
    return " ".join([*[word] * copies, last])
