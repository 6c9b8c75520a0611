"""Check of ``correction.proximal=same_engine``: mu must equal pi_old before it may replace it.

One engine with one set of weights computes one log-prob per token, so the forward pass for pi_old repeats the
rollout's. In the first step of a run this module checks it on every token, against the pass that later steps skip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from ..correction.proximal import TOLERANCE
from .rollout_checks import ALIGNED, pad_columns

_FIX = "Set correction.proximal=recompute: rollout and trainer are different engines, or use different dtypes."


class SameEngineError(RuntimeError):
    """mu differs from pi_old although ``correction.proximal=same_engine``; the message says where."""


def measure_difference(rollout_log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Compute |log mu - log pi_old| of each token.

    Args:
        rollout_log_prob, old_log_prob: (B, T).
        response_mask: (B, T) bool or 0/1.

    Returns:
        (B, T) float64 nats, 0 where the mask is False, inf where either is not finite.

    Example:
        >>> mask = torch.tensor([[1, 1, 0]])
        >>> measure_difference(torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.0, -2.5, -9.0]]), mask).tolist()
        [[0.0, 0.5, 0.0]]
    """
    apart = (rollout_log_prob.double() - old_log_prob.double()).abs()
    apart = torch.where(torch.isfinite(apart), apart, torch.inf)
    return torch.where(response_mask.bool(), apart, 0.0)


class SameEngineCheck:
    """Check of one run, in the trainer's process, active until a batch has shown that mu equals pi_old.

    A resumed run is a new process and checks its first step again.

    Attributes:
        largest: largest difference in the judged batch, nats; None before that.
    """

    def __init__(self) -> None:
        self.largest: float | None = None

    def judge(self, rows: TensorDict, uids: Sequence[str], step: int) -> None:
        """Judge a batch after the trainer has computed pi_old.

        Args:
            rows: with ``ALIGNED``, (B, T) each, nested or padded.
            uids: prompt of each row.

        Raises:
            SameEngineError: mu of a token differs from pi_old by more than ``TOLERANCE``.
        """
        mask, mu, old = pad_columns(rows, ALIGNED)
        apart = measure_difference(mu, old, mask)
        if not apart.numel() or not mask.any():
            return
        largest, place = apart.flatten().max(0)
        row, token = divmod(int(place), apart.shape[1])
        # This form also fails for NaN.
        if not largest <= TOLERANCE:
            beyond = int((apart > TOLERANCE).sum())
            raise SameEngineError(
                f"correction.proximal=same_engine: |mu - pi_old| is {float(largest):.3g} nats at step {step}, sequence "
                f"{row} (uid {uids[row]}), response token {token}: log mu is {float(mu[row, token]):.7g}, log pi_old "
                f"{float(old[row, token]):.7g}. {beyond} of {int(mask.bool().sum())} tokens differ by more than "
                f"{TOLERANCE:g}. {_FIX}"
            )
        self.largest = float(largest)

    def metrics(self) -> dict[str, float]:
        """Return ``same_engine/largest_difference``; NaN before a batch was judged."""
        return {"same_engine/largest_difference": math.nan if self.largest is None else self.largest}

    @property
    def passed(self) -> bool:
        """True after a batch has shown that mu equals pi_old."""
        return self.largest is not None
