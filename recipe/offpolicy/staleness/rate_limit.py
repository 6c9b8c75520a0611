"""The limit on how many prompts may be issued: pure counting, exact for fractions.

With B prompts per batch, N of them issued so far and i the version of the trainer's weights, AReaL's limit (arXiv:
2505.24298) is floor((N - 1) / B) <= i + eta: the last prompt is trained by weights that are at most eta versions newer.
Here step s begins with the weights of version s - 1, and N <= (s + eta) * B, which is the same for whole numbers. A
fractional eta allows that fraction of another batch, so the largest age is eta rounded up.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any


class RateLimitError(RuntimeError):
    """More prompts were issued than the limit allows."""


class RateLimit:
    """Account of issued prompts that were trained or still can be.

    Args:
        eta: batches by which sampling may run ahead of training, >= 0; a float is taken by its decimal text.
        batch: prompts per batch.

    Attributes:
        account: prompts issued, minus those that left untrained.
    """

    def __init__(self, eta: float, batch: int) -> None:
        # Through its text, so that 0.1 means 1/10 and not the nearest binary float.
        self.eta = Fraction(str(eta))
        self.batch = batch
        self.account = 0

    def room(self, step: int) -> int:
        """Compute how many prompts may be issued in ``step``, from 1; negative if fewer were allowed before."""
        return math.floor((step + self.eta) * self.batch) - self.account

    def issued(self, count: int, step: int) -> None:
        """Add prompts that were issued in ``step``.

        Raises:
            RateLimitError: they exceed the limit.
        """
        if count > (room := self.room(step)):
            raise RateLimitError(
                f"{count} prompts were issued in step {step}, but offpolicy.staleness.eta={format_eta(self.eta)} "
                f"allows {max(room, 0)} more: some code issues prompts past the limit."
            )
        self.account += count

    def left(self, count: int) -> None:
        """Subtract prompts that will never be trained: failed, filtered, evicted or lost."""
        self.account -= count

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        return {"eta": format_eta(self.eta), "account": self.account}

    def restore(self, step: int, waiting: int) -> None:
        """Resume after ``step`` completed steps, with ``waiting`` prompts restored from a checkpoint.

        The checkpoint's own count is not used, because the batch size may differ and prompts may be missing.
        """
        self.account = step * self.batch + waiting


def format_eta(eta: Fraction) -> str:
    """Format eta in Hydra's syntax: '2', '0.5'."""
    return f"{float(eta):g}"
