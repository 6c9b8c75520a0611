"""Test whether a rollout engine's answers to a fixed probe change like the trainer's.

g and e are log-probs of the probe's tokens at one synchronisation, by the engine and by the trainer's own forward pass;
dg and de are their changes since an earlier synchronisation. If the weights were delivered, dg = de + noise; if not, dg
is noise. The noise of 16-bit engines is correlated within a sequence, so sequences are the independent samples. Per
sequence, u = <dg - de, de> is symmetric around 0 if the weights were delivered, and -|de|^2 on average if not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Answers = Sequence[Sequence[float]]
"""Log-probs in nats, per sequence, of each token except the first."""

FLIPS = 4095
"""Number of random sign vectors for the p-value; the observed one makes 4096."""
LEVEL = 1e-3
LEAST_SLOPE = 0.5
RESOLVED = 0.2
"""Largest standard error of the slope at which a synchronisation is judged; above it, changes accumulate."""
IN_A_ROW = 3
"""Failures in a row that stop a run. With delivered weights each has a probability of at most ``LEVEL``: in 1 000
synchronisations 1 000 * 1e-9 = 1e-6."""


@dataclass(frozen=True)
class Change:
    """Changes of a probe between two synchronisations.

    Attributes:
        slope: regression of dg on de, 1 if the engine follows and 0 if it does not; NaN if de is 0.
        error: standard error of the slope over sequences; infinite if de is 0.
        p: probability of a sum of u as low as the observed one, over random signs of the sequences.
    """

    slope: float
    error: float
    p: float


def compare_changes(engine: Tensor, expected: Tensor, *, seed: int = 0) -> Change:
    """Compare the engine's changes with the expected ones.

    Args:
        engine: (S, T) float64, dg; 0 after a sequence's end.
        expected: (S, T) float64, de; 0 after a sequence's end.
        seed: seed of the random signs.
    """
    square = (expected * expected).sum(-1)
    whole = float(square.sum())
    if not whole > 0:
        return Change(math.nan, math.inf, 1.0)
    along = (engine * expected).sum(-1)
    slope = float(along.sum()) / whole
    count = len(square)
    spread = float((along - slope * square).square().sum())
    error = math.sqrt(spread * count / max(count - 1, 1)) / whole
    residual = along - square
    signs = torch.randint(0, 2, (FLIPS, count), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    sums = signs @ residual
    p = (1 + int((sums <= residual.sum()).sum())) / (FLIPS + 1)
    return Change(slope, error, p)


Outcome = Literal["first", "unresolved", "follows", "differs", "fails"]


class ProbeTest:
    """The test of one engine over all synchronisations of a run.

    Attributes:
        change: change since the reference, at the latest synchronisation.
        failures: number of failures in a row so far.
    """

    def __init__(self) -> None:
        self._reference: tuple[Tensor, Tensor] | None = None
        self.change = Change(math.nan, math.inf, 1.0)
        self.failures = 0
        self._judged = 0

    def step(self, engine: Answers, expected: Answers) -> Outcome:
        """Process the answers of one synchronisation.

        Returns:
            ``first``: there is nothing to compare with; ``unresolved``: the expected change is too small to judge and
            accumulates; ``follows``: the engine follows; ``differs``: it does not, which noise may explain; ``fails``:
            it does not for the ``IN_A_ROW``-th time in a row.
        """
        now = _stack(engine), _stack(expected)
        if self._reference is None:
            self._reference = now
            return "first"
        self.change = compare_changes(now[0] - self._reference[0], now[1] - self._reference[1], seed=self._judged)
        if not self.change.error <= RESOLVED:
            return "unresolved"
        self._reference = now
        self._judged += 1
        if self.change.p > LEVEL or self.change.slope >= LEAST_SLOPE:
            self.failures = 0
            return "follows"
        self.failures += 1
        return "fails" if self.failures >= IN_A_ROW else "differs"


def _stack(answers: Answers) -> Tensor:
    return pad_sequence([torch.tensor(each, dtype=torch.float64) for each in answers], batch_first=True)
