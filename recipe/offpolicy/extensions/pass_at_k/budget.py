"""Group sizes of a step for a fixed total, based on how much each prompt's group can teach about pass@k."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .summary import maximise_likelihood


def allocate(rates: Sequence[float], total: int, *, least: int, most: int, k: int = 4) -> list[int]:
    """Distribute ``total`` rollouts over prompts to maximise the sum of k (1 - p)^(k - 1) (1 - p^n - (1 - p)^n).

    The first factor is the derivative of pass@k = 1 - (1 - p)^k, which weighs hard prompts more, and all prompts
    equally at k = 1. The second is the probability that a group has both right and wrong answers; other groups teach
    nothing. Each further rollout of a prompt adds less than the one before, so the greedy choice is optimal; on ties,
    the hardest prompt gets it.

    Args:
        rates: p of each prompt, in [0, 1].
        total: number of rollouts of all prompts.
        least, most: bounds of the number of rollouts per prompt.
        k: k of pass@k.

    Raises:
        ValueError: the total is outside these bounds, or a rate is invalid.

    Example:
        >>> allocate([0.95, 0.5, 0.05], 24, least=2, most=16)
        [2, 6, 16]
    """
    count = len(rates)
    if not 1 <= least <= most or not least * count <= total <= most * count:
        raise ValueError(f"{total} rollouts for {count} prompts: expected {least} to {most} per prompt.")
    for prompt, p in enumerate(rates):
        if not 0 <= p <= 1:
            raise ValueError(f"the rate of prompt {prompt} is {p}: expected 0 to 1.")

    def rank(prompt: int, n: int) -> tuple[float, float, int]:
        p = rates[prompt]
        if not 0 < p < 1:
            return math.inf, p, prompt
        right, wrong = math.log(p), math.log1p(-p)
        ends = n * right + wrong, n * wrong + right
        # In logs: (1 - p)^(k - 1) underflows.
        return -(max(ends) + math.log1p(math.exp(min(ends) - max(ends))) + (k - 1) * wrong), p, prompt

    sizes = [least] * count
    heap = [rank(prompt, least) for prompt in range(count) if least < most]
    heapq.heapify(heap)
    for _ in range(total - least * count):
        *_, prompt = heapq.heappop(heap)
        sizes[prompt] += 1
        if sizes[prompt] < most:
            heapq.heappush(heap, rank(prompt, sizes[prompt]))
    return sizes


def identify_chat(prompt: Any) -> str:
    """Compute an identity of a prompt's messages that is stable over epochs."""
    return hashlib.blake2b(json.dumps(prompt, default=str, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass
class PassRates:
    """Success rates of prompts, from their own answers and a prior over all prompts.

    Attributes:
        decay: factor applied to earlier answers whenever a prompt is answered again.
        counts: prompt -> (answers, right ones), decayed.
        prior: a and b of a Beta over all prompts.
    """

    decay: float
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)
    prior: tuple[float, float] = (1.0, 1.0)

    def add(self, answers: Mapping[str, tuple[int, int]]) -> None:
        """Add each prompt's (answers, right answers), and fit the prior again."""
        if not answers:
            return
        for name, (n, c) in answers.items():
            before_n, before_c = self.counts.get(name, (0.0, 0.0))
            self.counts[name] = (self.decay * before_n + n, self.decay * before_c + c)
        pairs = torch.tensor(list(self.counts.values()), dtype=torch.float64)
        # Decayed counts are not whole numbers, which the likelihood allows.
        pairs, times = torch.unique(pairs, dim=0, return_counts=True)
        a, b, found = maximise_likelihood(pairs[:, 0], pairs[:, 1], times.double()[None])
        if len(self.counts) == 1:
            self.prior = (1.0, 1.0)
        elif bool(found[0]):
            self.prior = (float(a[0]), float(b[0]))
        else:
            # If prompts differ no more than by chance, the prior is the overall rate, as strong as a uniform prior.
            given, right = (float((pairs[:, column] * times).sum()) for column in (0, 1))
            self.prior = (2 * (right + 1) / (given + 2), 2 * (given - right + 1) / (given + 2))

    def estimate(self, name: str) -> float:
        """Estimate a prompt's rate: the mean of Beta(a + right, b + wrong)."""
        (a, b), (n, c) = self.prior, self.counts.get(name, (0.0, 0.0))
        return (a + c) / (a + b + n)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"counts": self.counts, "prior": self.prior}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``to_json`` returned."""
        self.counts = {name: (float(n), float(c)) for name, (n, c) in state["counts"].items()}
        self.prior = (float(state["prior"][0]), float(state["prior"][1]))
