"""Check of ``correction.proximal=same_engine``: mu has to be pi_old before it may stand in its place.

One engine with one set of weights computes one log-prob for a token, and the forward pass for pi_old repeats what the
rollout did. That it does is measured in a run's first step, on every token, against the pass that is to be left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from ..correction.proximal import TOLERANCE
from .rollout_checks import ALIGNED, pad_columns

_FIX = "Set correction.proximal=recompute: rollout and trainer are two engines, or one in two dtypes."


class SameEngineError(RuntimeError):
    """mu is not pi_old although ``correction.proximal=same_engine`` says so; the message says where it differs."""


def measure_difference(rollout_log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Compute |log mu - log pi_old| of each token.

    Args:
        rollout_log_prob, old_log_prob: (B, T).
        response_mask: (B, T) bool or 0/1.

    Returns:
        (B, T) float64 nats, 0 off the mask, inf where either is not finite.

    Example:
        >>> mask = torch.tensor([[1, 1, 0]])
        >>> measure_difference(torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.0, -2.5, -9.0]]), mask).tolist()
        [[0.0, 0.5, 0.0]]
    """
    apart = (rollout_log_prob.double() - old_log_prob.double()).abs()
    apart = torch.where(torch.isfinite(apart), apart, torch.inf)
    return torch.where(response_mask.bool(), apart, 0.0)


class SameEngineCheck:
    """Check of one run, in the trainer's process; it lasts until a batch has shown that mu is pi_old.

    A run that is resumed is another process, whose first step is checked again.

    Attributes:
        largest: the largest difference of the batch that was judged, nats; None before there was one.
    """

    def __init__(self) -> None:
        self.largest: float | None = None

    def judge(self, rows: TensorDict, uids: Sequence[str], step: int) -> None:
        """Judge a batch whose pi_old the trainer has computed.

        Args:
            rows: with ``ALIGNED``, (B, T) each, nested or padded.
            uids: of each row, its prompt.

        Raises:
            SameEngineError: a token's mu differs from pi_old by more than ``TOLERANCE``.
        """
        mask, mu, old = pad_columns(rows, ALIGNED)
        apart = measure_difference(mu, old, mask)
        if not apart.numel() or not mask.any():
            return
        largest, place = apart.flatten().max(0)
        row, token = divmod(int(place), apart.shape[1])
        # Written so that NaN fails.
        if not largest <= TOLERANCE:
            beyond = int((apart > TOLERANCE).sum())
            raise SameEngineError(
                f"correction.proximal=same_engine: |mu - pi_old| is {float(largest):.3g} nats at step {step}, row "
                f"{row} (uid {uids[row]}), response token {token}: log mu is {float(mu[row, token]):.7g}, log pi_old "
                f"{float(old[row, token]):.7g}. Of {int(mask.bool().sum())} tokens {beyond} differ by more than "
                f"{TOLERANCE:g}. {_FIX}"
            )
        self.largest = float(largest)

    def metrics(self) -> dict[str, float]:
        """Return ``same_engine/largest_difference``; NaN until a batch was judged."""
        return {"same_engine/largest_difference": math.nan if self.largest is None else self.largest}

    @property
    def passed(self) -> bool:
        """True once a batch has shown that mu is pi_old."""
        return self.largest is not None
