"""Columns that carry teacher log-probs to the workers, and the tokens that take part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TEACHER = "offpolicy_opd_teacher"
"""float32 per token: the teacher's log-prob; NaN where it was not requested."""
ROW = "offpolicy_opd_row"
"""int8 per row: 1 for an eligible rollout."""
FACTOR = "offpolicy_opd_factor"
"""float32 per row: the schedule's factor / the divisor of the advantages, the same for the whole batch."""
CENTRE = "offpolicy_opd_centre"
"""float32 per row: what is subtracted from the gaps, the same for the whole batch."""
SENT = (TEACHER, ROW, FACTOR, CENTRE)
"""All columns, which the loss needs."""


def describe_missing(arrived: Iterable[str]) -> str:
    """Describe that teacher log-probs did not reach the loss, and which columns did."""
    return (
        f"opd: {TEACHER} did not reach the loss (there: {', '.join(arrived) or 'none of its columns'}). "
        f"Some code selects the columns that go to the workers, and omits those of opd."
    )


def find_scored(teacher: Tensor, row: Tensor, response_mask: Tensor) -> Tensor:
    """Find the tokens that the teacher has scored, (B, T) bool."""
    return row.bool()[:, None] & response_mask.bool() & ~torch.isnan(teacher)
