"""Checksums of a rollout's rows, as the trainer computes them before the first update."""

from __future__ import annotations

from tensordict import TensorDict

from recipe.offpolicy.batch.micro_batch import ROLLOUT_LOG_PROBS
from recipe.offpolicy.batch.seals import compute_row_checksums


def compute_sampled_checksums(data: TensorDict) -> list[int]:
    """The row checksums of a rollout as verl stores it, nested or padded."""
    return compute_row_checksums(data["responses"], data["response_mask"], data[ROLLOUT_LOG_PROBS])
