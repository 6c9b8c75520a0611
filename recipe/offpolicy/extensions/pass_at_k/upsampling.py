"""Replaces verl's sampler: draws training prompts according to how much their groups can teach about pass@k."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .budget import PassRates

NUMBER = "offpolicy_prompt"
"""Column of a batch of prompts: each prompt's number in the data set."""


def compute_chances(rates: PassRates, prompts: int, n: int, uniform_share: float, k: int = 4) -> Tensor:
    """Compute the probability that each prompt is drawn next, (prompts,) float64, with sum 1.

    ``uniform_share`` of the probability is uniform, so that every prompt is drawn again; the rest is proportional to k
    (1 - p)^(k - 1) (1 - p^n - (1 - p)^n), see ``budget.allocate``.

    Args:
        rates: rates of prompts, by their number as a string.
        prompts: number of prompts of the data set.
        n: rollouts per prompt, 2 or more.
        uniform_share: in (0, 1].
        k: k of pass@k; at 1 only the probability of a mixed group counts.

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
    # In logs: (1 - p)^(k - 1) of solved prompts underflows, and the sum of all would be 0.
    worth = ((k - 1) * log_wrong + log_mixed).clamp(min=torch.finfo(torch.float64).min).softmax(0)
    return uniform_share / prompts + (1 - uniform_share) * worth


class BlockSampler:
    """Sampler of row numbers in blocks without repeated rows; an epoch has as many draws as rows.

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
        """Draw one block, each row with its probability among the remaining ones."""
        drawn: list[int] = torch.multinomial(self._chances(), self.block, generator=self.generator).tolist()
        return drawn

    def hand_out(self, row: int) -> int:
        """Record a row that the data loader takes."""
        self._handed.append(row)
        return row

    def forget(self) -> None:
        """Discard rows of a batch that was never completed."""
        self._handed.clear()

    def take(self, count: int) -> list[int]:
        """Return the rows that the loader took last, which form the current batch."""
        return [self._handed.popleft() for _ in range(count)]


class _Draws(Iterator[int]):
    """One epoch, whose state is saved in verl's checkpoint with the data loader's state."""

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
        """Return the state, including the keys of verl's own sampler, so that a run may continue with either."""
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
