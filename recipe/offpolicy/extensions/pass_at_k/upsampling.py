"""Choice of prompts and of their group sizes, depending on how much the groups can contribute to pass@k."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .summary import maximise_likelihood


def allocate(rates: Sequence[float], total: int, *, least: int, most: int, k: int = 4) -> list[int]:
    """Distribute ``total`` rollouts over prompts to maximise the sum of k (1 - p)^(k - 1) (1 - p^n - (1 - p)^n).

    The first factor is the derivative of pass@k = 1 - (1 - p)^k, which weights hard prompts more, and all prompts
    equally at k = 1. The second factor is the probability that a group has both correct and wrong answers; other groups
    contribute nothing. Each further rollout of a prompt adds less than the previous one, so the greedy choice is
    optimal. Ties are resolved in favour of the hardest prompt.

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
        # This is computed in logs, because (1 - p)^(k - 1) underflows.
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
    """Compute an identifier of a prompt's messages that is stable over epochs."""
    return hashlib.blake2b(json.dumps(prompt, default=str, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass
class PassRates:
    """Success rates of prompts, from their own answers and a prior over all prompts.

    Attributes:
        decay: factor applied to earlier answers whenever a prompt is answered again.
        counts: prompt -> (answers, correct answers), decayed.
        prior: a and b of a Beta distribution over all prompts.
    """

    decay: float
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)
    prior: tuple[float, float] = (1.0, 1.0)

    def add(self, answers: Mapping[str, tuple[int, int]]) -> None:
        """Add each prompt's (answers, correct answers), and fit the prior again."""
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
            # If prompts differ no more than by chance, the prior is the overall rate with the strength of a uniform
            # prior.
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


NUMBER = "offpolicy_prompt"
"""Column of a batch of prompts: each prompt's number in the data set."""


def compute_chances(rates: PassRates, prompts: int, n: int, uniform_share: float, k: int = 4) -> Tensor:
    """Compute the probability that each prompt is drawn next, (prompts,) float64, with sum 1.

    ``uniform_share`` of the probability is uniform, so that every prompt is drawn again at some point; the rest is
    proportional to k (1 - p)^(k - 1) (1 - p^n - (1 - p)^n), see ``allocate``.

    Args:
        rates: rates of prompts, by their number as a string.
        prompts: number of prompts of the data set.
        n: rollouts per prompt, 2 or more.
        uniform_share: in (0, 1].
        k: k of pass@k; if it is 1, only the probability of a mixed group counts.

    Example:
        >>> found = compute_chances(PassRates(1.0, {"0": (6, 6)}), 2, 2, 0.2, k=2)  # p = 7/8 and 1/2
        >>> [round(each, 4) for each in found.tolist()]  # worths 2 / 8 x 7/32 and 2 / 2 x 1/2
        [0.1789, 0.8211]
    """
    a, b = rates.prior
    counts = torch.zeros(prompts, 2, dtype=torch.float64)
    if rates.counts:
        counts[[int(name) for name in rates.counts]] = torch.tensor(list(rates.counts.values()), dtype=torch.float64)
    answers, right = counts.unbind(-1)
    log_right, log_wrong = ((mass / (a + b + answers)).log() for mass in (a + right, b + answers - right))
    log_mixed = (-torch.expm1(torch.logaddexp(n * log_right, n * log_wrong))).log()
    # This is computed in logs, because (1 - p)^(k - 1) underflows for solved prompts, and the sum over all prompts
    # could be 0.
    worth = ((k - 1) * log_wrong + log_mixed).clamp(min=torch.finfo(torch.float64).min).softmax(0)
    return uniform_share / prompts + (1 - uniform_share) * worth


class BlockSampler:
    """Sampler of row numbers, in blocks without repeated rows; an epoch has as many draws as there are rows.

    Args:
        rows: number of rows of the data set.
        block: rows per block, at most ``rows``.
        chances: called for each block; computes (rows,) probabilities.
        seed: seed of the draws.
    """

    def __init__(self, rows: int, block: int, chances: Callable[[], Tensor], seed: int) -> None:
        self.rows, self.block = rows, min(block, rows)
        self._chances = chances
        self.generator = torch.Generator().manual_seed(seed)
        self._handed: deque[int] = deque()

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        return _Draws(self)

    def draw(self) -> list[int]:
        """Draw one block, each row with its probability among the remaining rows."""
        drawn: list[int] = torch.multinomial(self._chances(), self.block, generator=self.generator).tolist()
        return drawn

    def hand_out(self, row: int) -> int:
        """Record that the data loader takes a row, and return the row."""
        self._handed.append(row)
        return row

    def forget(self) -> None:
        """Discard rows of a batch that was never completed."""
        self._handed.clear()

    def take(self, count: int) -> list[int]:
        """Return the rows that the loader took last, which form the current batch."""
        return [self._handed.popleft() for _ in range(count)]


class _Draws(Iterator[int]):
    """The draws of one epoch, whose state is saved in verl's checkpoint with the data loader's state."""

    def __init__(self, sampler: BlockSampler) -> None:
        self._sampler = sampler
        self._left: list[int] = []
        self._drawn = 0
        sampler.forget()

    def __next__(self) -> int:
        if self._drawn == len(self._sampler):
            raise StopIteration
        if not self._left:
            self._left = self._sampler.draw()
        self._drawn += 1
        return self._sampler.hand_out(self._left.pop(0))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, including the keys of verl's own sampler, so that a run can continue with either one."""
        own = {"rows": len(self._sampler), "left": list(self._left)}
        return own | {"yielded": self._drawn, "generator": self._sampler.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``.

        Raises:
            ValueError: the state was saved with other data.
        """
        rows = state.get("rows", len(self._sampler))
        if rows != len(self._sampler):
            raise ValueError(
                f"the checkpoint's run drew from {rows} prompts, but data.train_files has {len(self._sampler)}. Fix: "
                "resume with that run's data, or set trainer.resume_mode=disable."
            )
        self._drawn, self._left = state["yielded"], list(state.get("left", ()))
        self._sampler.generator.set_state(state["generator"])
        self._sampler.forget()


def number_prompts(collate: Callable[[Sequence[Any]], Any], sampler: BlockSampler) -> Callable[[Sequence[Any]], Any]:
    """Wrap a collate function so that batches include ``NUMBER``; for a loader without worker processes."""

    def numbered(rows: Sequence[Any]) -> Any:
        batch = collate(rows)
        batch[NUMBER] = np.array(sampler.take(len(rows)), dtype=object)
        return batch

    return numbered


def replace_sampler(loader: Any, sampler: BlockSampler) -> Any:
    """Rebuild verl's data loader with another sampler; batches include ``NUMBER``."""
    return type(loader)(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        num_workers=0,
        drop_last=loader.drop_last,
        collate_fn=number_prompts(loader.collate_fn, sampler),
        sampler=sampler,
    )
