"""Training for pass@k: advantages whose policy gradient is the gradient of pass@k, prompt choice and group sizes.

A prompt has N samples, c of which are correct; rho(n, c, k) = 1 - C(n - c, k) / C(n, k).
"""

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

from .estimates import maximise_likelihood, rho

OBJECTIVES = ("loo", "loo_minus_one", "analytic", "groups")


def advantages(right: Tensor | Sequence[bool], k: int, *, objective: str, seed: int = 0) -> Tensor:
    """Compute the advantages of one group for pass@k, (N,) float64.

    ``loo``: k (g_i - rho(N - 1, c - R_i, k)), where g_i is 1 for a correct row, otherwise rho(N - 1, c, k - 1). g_i is
    pass@k with the row among the k samples, and the second term is pass@k without the row. The estimate of grad pass@k
    is unbiased, and equals RLOO at k = 1. It needs k < N.

    ``loo_minus_one``: k C(N - c, k - 1) / C(N - 1, k - 1) for correct rows, 0 for wrong rows: how much the row adds to
    k - 1 other rows (PKPO, arXiv 2505.15201). This is unbiased. At k = N, it is N times verl's ``grpo_passk`` without
    division by the standard deviation.

    ``analytic``: the mean over all subsets of k rows that contain the row, with the subsets' rewards normalised by
    their mean and std (arXiv 2508.10751, eq. 11 to 14). Its sum is 0, and its absolute value is at most sqrt(N - 1).
    Because of the scale 1 / sqrt(R (1 - R)), this objective differs from pass@k. It is 0 if all subsets contain a
    correct row, or if none does.

    ``groups``: rows are split at random into N / k groups, and each row's advantage is its group's best reward minus
    the mean over groups. Its mean over all splits is ``analytic`` before scaling, but its variance is much larger. k
    must divide N.

    Args:
        right: (N,) bool, or 0 and 1.
        k: number of samples of which at least one must be correct.
        seed: seed of the split.

    Raises:
        ValueError: the objective is not defined for this k.

    Example:
        >>> advantages([1, 0, 0, 0], 2, objective="loo_minus_one").tolist()
        [2.0, 0.0, 0.0, 0.0]
    """
    marks = torch.as_tensor(right).bool()
    n, c = len(marks), int(marks.sum())
    if (reason := find_impossible(n, k, objective)) is not None:
        raise ValueError(reason)
    if objective == "groups":
        return _deal(marks, k, seed)
    of_right, of_wrong = {"loo": _loo, "loo_minus_one": _loo_minus_one, "analytic": _analytic}[objective](n, c, k)
    return torch.tensor([of_wrong, of_right], dtype=torch.float64)[marks.long()]


def find_impossible(n: int, k: int, objective: str) -> str | None:
    """Explain why an objective is not defined for k and n rows; None if it is defined."""
    most = n - 1 if objective == "loo" else n
    if k < 1 or k > most:
        return f"k={k} with a group of {n}: {objective} needs 1 <= k <= {most}."
    if objective == "groups" and n % k:
        return f"k={k} with a group of {n}: the objective groups needs a k that divides the group's size."
    return None


def _loo(n: int, c: int, k: int) -> tuple[float, float]:
    of_right = k * (1 - rho(n - 1, c - 1, k)) if c else 0.0
    of_wrong = k * (rho(n - 1, c, k - 1) - rho(n - 1, c, k)) if c < n else 0.0
    return of_right, of_wrong


def _loo_minus_one(n: int, c: int, k: int) -> tuple[float, float]:
    return (k * math.comb(n - c, k - 1) / math.comb(n - 1, k - 1) if c else 0.0), 0.0


def _analytic(n: int, c: int, k: int) -> tuple[float, float]:
    if c == 0 or n - c < k:
        return 0.0, 0.0
    # (1 - R) / s = sqrt((1 - R) / R), in whole numbers: 1 - R is below float64's rounding of R if few subsets fail.
    failed = math.comb(n - c, k)
    of_right = math.sqrt(failed / (math.comb(n, k) - failed))
    return of_right, -of_right * c / (n - c)


def _deal(marks: Tensor, k: int, seed: int) -> Tensor:
    order = torch.randperm(len(marks), generator=torch.Generator().manual_seed(seed))
    best = marks[order].view(-1, k).any(-1).double()
    dealt = torch.empty(len(marks), dtype=torch.float64)
    dealt[order] = (best - best.mean()).repeat_interleave(k)
    return dealt


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

    Example:
        >>> allocate([0.95, 0.5, 0.05], 24, least=2, most=16)
        [2, 6, 16]
    """
    count = len(rates)

    def rank(prompt: int, n: int) -> tuple[float, float, int]:
        p = rates[prompt]
        if not 0 < p < 1:
            return math.inf, p, prompt
        right, wrong = math.log(p), math.log1p(-p)
        ends = n * right + wrong, n * wrong + right
        # Use logarithms, because (1 - p)^(k - 1) underflows.
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
    """Success rates of prompts, estimated from each prompt's answers and a prior over all prompts.

    Attributes:
        decay: factor by which a prompt's earlier counts are multiplied when new answers arrive.
        counts: maps each prompt to (answers, correct answers), with decay.
        prior: a and b of a Beta distribution over all prompts.
    """

    decay: float
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)
    prior: tuple[float, float] = (1.0, 1.0)

    def add(self, answers: Mapping[str, tuple[int, int]]) -> None:
        """Add each prompt's (answers, correct answers), and refit the prior."""
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
"""Column with each prompt's number in the data set."""


def compute_chances(rates: PassRates, prompts: int, n: int, uniform_share: float, k: int = 4) -> Tensor:
    """Compute the probability that each prompt is drawn next, (prompts,) float64, with sum 1.

    ``uniform_share`` of the probability is uniform, so that every prompt is drawn again at some point; the rest is
    proportional to k (1 - p)^(k - 1) (1 - p^n - (1 - p)^n), see ``allocate``.

    Args:
        rates: rates of prompts, by their number as a string.
        prompts: number of prompts of the data set.
        n: rollouts per prompt, 2 or more.
        uniform_share: in (0, 1].
        k: the k of pass@k; if it is 1, only the probability of a mixed group counts.

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
    """Draws row numbers in blocks without repeated rows; an epoch has as many draws as there are rows.

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
        """Draw one block without replacement, with the given probabilities."""
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
        """Return the rows that the loader took most recently, which form the current batch."""
        return [self._handed.popleft() for _ in range(count)]


class _Draws(Iterator[int]):
    """The draws of one epoch; verl saves their state in its checkpoint together with the data loader's state."""

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
        """Return the state, including the keys of verl's own sampler, so that either sampler can continue the run."""
        own = {"rows": len(self._sampler), "left": list(self._left)}
        return own | {"yielded": self._drawn, "generator": self._sampler.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``.

        Raises:
            ValueError: the state was saved with other data.
        """
        rows = state.get("rows", len(self._sampler))
        if rows != (now := len(self._sampler)):
            fix = "resume with that run's data, or set trainer.resume_mode=disable."
            raise ValueError(
                f"the checkpoint's run drew from {rows} prompts, but data.train_files has {now}. Fix: {fix}"
            )
        self._drawn, self._left = state["yielded"], list(state.get("left", ()))
        self._sampler.generator.set_state(state["generator"])
        self._sampler.forget()


def replace_sampler(loader: Any, sampler: BlockSampler) -> Any:
    """Rebuild verl's data loader with another sampler, without worker processes; batches include ``NUMBER``."""

    def number_prompts(rows: Sequence[Any]) -> Any:
        batch = loader.collate_fn(rows)
        batch[NUMBER] = np.array(sampler.take(len(rows)), dtype=object)
        return batch

    return type(loader)(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        num_workers=0,
        drop_last=loader.drop_last,
        collate_fn=number_prompts,
        sampler=sampler,
    )
