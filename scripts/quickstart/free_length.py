"""The task with answers of free length: words are spelt backward after as many copies as the policy likes."""

from __future__ import annotations

import random
from typing import Any

REPEATS, BASE, SLOPE = 6, 0.2, 0.15
MOST_TOKENS = 56
"""Of an answer: seven words of up to six letters, and what stands between them."""
COEFFICIENTS = {"uniform": 2e-3, "group": 0.1, "anchor": 0.1}
"""Of length penalties on this task; uniform: an answer of ``MOST_TOKENS`` loses 0.11."""
ANCHOR = {"per": "source", "pass_rate": 0.4, "min_samples": 64}
"""Of ``length_penalty.anchor``: prompts come again too rarely for anchors of their own, and few are solved at first."""


def demonstrate_at_length(entry: dict[str, Any], rng: random.Random) -> str:
    """Sample an answer: 0 to 6 copies of the word, then it backward, or as it stands.

    It is right with probability 0.2 + 0.15 for each copy, so that who learns from these finds longer answers better.
    """
    copies = rng.randint(0, REPEATS)
    word = entry["metadata"]["word"]
    last = entry["answer"] if rng.random() < BASE + SLOPE * copies else word
    return " ".join([*[word] * copies, last])
