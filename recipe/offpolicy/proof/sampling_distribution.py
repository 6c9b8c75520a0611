"""Check that mu is the distribution that tokens were sampled from, by the mean of pi_old / mu over the samples.

The sum over the vocabulary of mu(v) * pi_old(v) / mu(v) is 1 for any pi_old, however far the weights differ. An engine
that samples from p but reports q gives the sum of p * pi_old / q. With pi_old = p this is 1 + chi2(p | q) > 1, for
example with raw log-probs or another temperature. The excess is a martingale over tokens, so responses may end at any
token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..correction.row_blocks import split_tokens
from .rollout_log_probs import RolloutLogProbError

LEAST_ROWS, ENOUGH_ROWS = 32, 256
"""Fewest responses that are judged, and the number of responses after which the check ends."""
TOLERANCE, ERRORS = 0.02, 5.0
"""Excess of the mean over 1 allowed for rounding, and the number of standard errors (per response) on top of it."""
_LARGEST = 20.0
"""Cap of a log-ratio before exp, in nats."""


@dataclass(frozen=True)
class ExcessTally:
    """Sums of pi_old / mu - 1 over responses; plain Python, adds up over batches.

    Attributes:
        total, squares: sums over responses of each response's sum, and of its square.
    """

    total: float = 0.0
    squares: float = 0.0
    tokens: int = 0
    rows: int = 0

    def __add__(self, other: ExcessTally) -> ExcessTally:
        return ExcessTally(
            self.total + other.total,
            self.squares + other.squares,
            self.tokens + other.tokens,
            self.rows + other.rows,
        )

    def judge(self) -> None:
        """Raise ``RolloutLogProbError`` if the mean exceeds 1 by more than rounding and chance explain."""
        if self.rows < LEAST_ROWS:
            return
        mean, error = self.total / self.tokens, math.sqrt(self.squares) / self.tokens
        if mean - ERRORS * error > TOLERANCE:
            raise RolloutLogProbError(
                f"tokens were not sampled from the distribution that rollout_log_probs report: the mean of pi_old / mu "
                f"over {self.tokens} tokens is {1 + mean:.3f} (standard error {error:.3f}), but must be 1 for any "
                f"pi_old. Typical causes are raw log-probs, before the temperature, and a different temperature. "
                f"Configure the rollout engine to return processed log-probs at "
                f"actor_rollout_ref.rollout.temperature. If this is intended, set "
                f"offpolicy.allow_unrelated_log_probs=true."
            )


@torch.no_grad()
def tally_excess(rollout_log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> ExcessTally:
    """Sum pi_old / mu - 1 per response, skipping tokens at which either is not finite.

    Args:
        rollout_log_prob, old_log_prob: (B, T), or nested by row.
        response_mask: (B, T) bool or 0/1, or nested by row like them.

    Example:
        >>> mask = torch.ones(2, 2)
        >>> tally_excess(torch.tensor([[0.5, 0.5], [0.25, 0.5]]).log(), torch.full((2, 2), 0.5).log(), mask)
        ExcessTally(total=1.0, squares=1.0, tokens=4, rows=2)
    """
    columns = {"mu": rollout_log_prob, "old": old_log_prob, "mask": response_mask}
    found = ExcessTally()
    for _, rows, block in split_tokens(columns):
        apart = block["old"].double() - block["mu"].double()
        there = block["mask"].bool() & torch.isfinite(apart)
        by_row = rows.sum(torch.where(there, apart.clamp(max=_LARGEST).expm1(), 0.0))
        tokens = rows.sum(there)
        sums = torch.stack([by_row.sum(), by_row.square().sum(), tokens.sum(), (tokens > 0).sum()]).tolist()
        found += ExcessTally(sums[0], sums[1], int(sums[2]), int(sums[3]))
    return found
