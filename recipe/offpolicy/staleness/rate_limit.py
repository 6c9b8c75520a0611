"""The limit on how many prompts may be issued: pure counting, exact for fractions.

With B prompts in a batch, N of them issued so far and i the version of the trainer's weights, AReaL's limit (arXiv:
2505.24298) is floor((N - 1) / B) <= i + eta: the last prompt is trained by weights that are at most eta versions newer.
Here step s begins with the weights of version s - 1, and N <= (s + eta) * B, which is the same for whole numbers. For a
fraction it admits that part of another batch, so that the oldest age is eta rounded up.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any


class RateLimitError(RuntimeError):
    """More prompts were issued than the limit admits."""


class RateLimit:
    """Account of the prompts that were issued and either trained, or may still be.

    Args:
        eta: batches by which sampling may run ahead of training, >= 0; a float is taken as it is written.
        batch: prompts in a batch.

    Attributes:
        account: prompts issued, less those that left untrained.
    """

    def __init__(self, eta: float, batch: int) -> None:
        # Through its text: 0.1 * 10 is 1, and the binary float below or above 0.1 is not meant.
        self.eta = Fraction(str(eta))
        self.batch = batch
        self.account = 0

    def room(self, step: int) -> int:
        """Compute how many prompts may be issued in ``step``, from 1; below 0 where fewer were admitted before."""
        return math.floor((step + self.eta) * self.batch) - self.account

    def issued(self, count: int, step: int) -> None:
        """Add prompts that were issued in ``step``.

        Raises:
            RateLimitError: there was no room for them.
        """
        if count > (room := self.room(step)):
            raise RateLimitError(
                f"{count} prompts were issued in step {step}, and offpolicy.staleness.eta={format_eta(self.eta)} had "
                f"room for {max(room, 0)}: something issues prompts past the limit."
            )
        self.account += count

    def left(self, count: int) -> None:
        """Take away prompts that will never be trained: failed, filtered, evicted or lost."""
        self.account -= count

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in plain values."""
        return {"eta": format_eta(self.eta), "account": self.account}

    def restore(self, step: int, waiting: int) -> None:
        """Begin after ``step`` completed steps, with ``waiting`` prompts that a checkpoint has brought back.

        A checkpoint's own count is not used: the batch may have another size, and prompts may be missing.
        """
        self.account = step * self.batch + waiting


def format_eta(eta: Fraction) -> str:
    """Format eta as Hydra has it: '2', '0.5'."""
    return f"{float(eta):g}"
