"""Test whether a rollout engine's answers to a fixed probe change as the trainer's do.

g and e are log-probs of the probe's tokens, of the engine and of the trainer's own forward pass, at the same
synchronisation; dg and de are their changes since an earlier one. With the weights delivered dg = de + noise, without
them dg is noise. Noise of 16-bit engines is correlated along a sequence, so that sequences are what is independent: of
each, u = <dg - de, de> is 0 on average and symmetric if the weights were delivered, and -|de|^2 if they were not.
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
"""Log-probs in nats: of each sequence, of each token but the first."""

FLIPS = 4095
"""Random signs that the p-value is computed from; with the observed ones they make 4096."""
LEVEL = 1e-3
LEAST_SLOPE = 0.5
RESOLVED = 0.2
"""Standard error of the slope up to which a synchronisation is judged; above it changes accumulate."""
IN_A_ROW = 3
"""Failures one after another that stop a run. Healthy, each has a probability of at most ``LEVEL``: in 1 000
synchronisations 1 000 * 1e-9 = 1e-6."""


@dataclass(frozen=True)
class Change:
    """The changes of a probe between two synchronisations.

    Attributes:
        slope: regression of dg on de, 1 if the engine follows and 0 if it does not; NaN where de is 0.
        error: its standard error, by sequences; infinite where de is 0.
        p: probability of a sum of u as low as this one, over random signs of the sequences.
    """

    slope: float
    error: float
    p: float


def compare_changes(engine: Tensor, expected: Tensor, *, seed: int = 0) -> Change:
    """Compare the changes of the engine with those expected.

    Args:
        engine: (S, T) float64, dg; 0 behind a sequence's end.
        expected: (S, T) float64, de; 0 behind a sequence's end.
        seed: of the random signs.
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
    """The test of one engine over a run's synchronisations.

    Attributes:
        change: since the reference, at the latest synchronisation.
        failures: one after another, up to now.
    """

    def __init__(self) -> None:
        self._reference: tuple[Tensor, Tensor] | None = None
        self.change = Change(math.nan, math.inf, 1.0)
        self.failures = 0
        self._judged = 0

    def step(self, engine: Answers, expected: Answers) -> Outcome:
        """Take the answers of one synchronisation.

        Returns:
            ``first``: there is nothing to compare with; ``unresolved``: the expected change is too small for a verdict,
            and accumulates; ``follows``; ``differs``: it does not, which noise may explain; ``fails``: for the
            ``IN_A_ROW``-th time in a row.
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
