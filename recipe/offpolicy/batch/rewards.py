"""Check of rewards: a non-finite reward makes comparisons wrong or all advantages of its group NaN."""

from __future__ import annotations

from collections.abc import Sequence

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
        uids: (B,) prompt of each sequence.
        where: description of the batch for errors, for example "step 3".
        advice: sentences on what to do.

    Raises:
        RewardError: a reward is not finite; names the first such sequence.
    """
    values = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    by_row = values if values.dim() == 1 else values.sum(-1)
    lost = ~torch.isfinite(by_row)
    if not bool(lost.any()):
        return
    row = int(lost.nonzero()[0])
    of = ", ".join(filter(None, (f"prompt {uids[row]}", where)))
    raise RewardError(f"the reward of sequence {row} ({of}) is {float(by_row[row])}. {advice}")
