"""Checks of values before they are compared or used as divisors: rewards must be finite, a spread not almost zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class RewardError(ValueError):
    """A sequence's reward is not finite."""


_BY_FUNCTION = "Return a finite number from the reward function."
BY_KL = (
    "Its score is finite, but the KL of algorithm.use_kl_in_reward is not: log-probs of the policy or the reference "
    "are not finite. Check the reference model, or set algorithm.use_kl_in_reward=false."
)


def check_rewards(rewards: Tensor, uids: Sequence[object], where: str = "", advice: str = _BY_FUNCTION) -> None:
    """Check that the rewards of all sequences are finite.

    Args:
        rewards: (B,), or (B, T) per token; the sum over a row must be finite too.
        uids: (B,) uids of the sequences' prompts.
        where: description of the batch for errors, for example "step 3".
        advice: sentences on what to do.

    Raises:
        RewardError: a reward is not finite; the message names the first such sequence.
    """
    values = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    by_row = values if values.dim() == 1 else values.sum(-1)
    lost = ~torch.isfinite(by_row)
    if not bool(lost.any()):
        return
    row = int(lost.nonzero()[0])
    of = ", ".join(filter(None, (f"prompt {uids[row]}", where)))
    raise RewardError(f"the reward of sequence {row} ({of}) is {float(by_row[row])}. {advice}")


ROUNDING = 8 * 2.0**-23
"""Largest spread, relative to the largest value, that float32 rounding can explain, because a reward is a sum of a few
rounded terms."""
SMALLEST = 2.0**-126
"""Smallest normal float32; the rounding error of smaller numbers is as large as that of this number."""


def mean(values: Tensor) -> float:
    """Compute the mean in float64; NaN if there are no values."""
    return float(values.double().mean())


@dataclass(frozen=True)
class Spread:
    """Standard deviation about the mean, or root mean square, of one set of values.

    Attributes:
        value: 0 or more, in the unit of the values.
        certainty: 0 if rounding explains all of ``value``, 1 if ``value`` is at least twice what rounding explains,
            linear in between.
    """

    value: float
    certainty: float

    def invert(self, otherwise: float = 0.0) -> float:
        """Compute the normalising factor: 1 / value, or ``otherwise`` if rounding explains the spread; continuous.

        With ``otherwise=0``, values that agree within rounding become 0. In all other cases, n normalised values are at
        most sqrt(n - 1) if they were centred, and at most sqrt(n) if they were divided by their root mean square.
        """
        known = self.certainty / self.value if self.certainty else 0.0
        return known + (1 - self.certainty) * otherwise


def measure_spread(values: Tensor, *, centred: bool, size: float = 0.0) -> Spread:
    """Measure the spread of values.

    Args:
        values: (n,) float; the spread about the mean is 0 for fewer than two values.
        centred: True for the unbiased standard deviation about the mean; False for the root mean square, for a scale
            without centring.
        size: magnitude of the numbers from which the values were computed, for example as differences; rounding is
            relative to the larger of ``size`` and the largest value.

    Raises:
        ValueError: a value is not finite.

    Example:
        >>> measure_spread(torch.tensor([1.0, 1.0 + 2**-22]), centred=True).certainty  # two steps of float32 apart
        0.0
        >>> measure_spread(torch.tensor([3.0, 4.0]), centred=False).invert() == 12.5**-0.5
        True
    """
    if not torch.isfinite(values).all():
        at = int((~torch.isfinite(values)).nonzero()[0])
        raise ValueError(f"value {at} of {len(values)} is {float(values[at])}: expected finite numbers.")
    values = values.double()
    peak = float(values.abs().max()) if len(values) > int(centred) else 0.0
    if not peak:
        return Spread(0.0, 0.0)
    scaled = values / peak  # squares of large values overflow
    value = peak * float(scaled.std() if centred else scaled.square().mean().sqrt())
    certainty = value / (ROUNDING * max(peak, size, SMALLEST)) - 1
    return Spread(value, min(max(certainty, 0.0), 1.0))
