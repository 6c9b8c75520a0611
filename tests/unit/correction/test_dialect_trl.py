"""Corrections in TRL's keys: open bounds. tests/conformance compares with TRL itself."""

from __future__ import annotations

import math

import torch

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.dialect_rows import coefficients

from_trl = CorrectionSpec.from_trl


def test_trl_bounds_may_be_open() -> None:
    """Products e^1 = 2.718 and e^-1 = 0.368 with clip_min = 0.5 alone: the second is raised to it, or dropped."""
    log_rho = torch.tensor([[1.0], [-1.0]])
    stem = "vllm_importance_sampling"
    for mode, second in (("token_truncate", 0.5), ("token_mask", 0.0), ("sequence_mask", 0.0)):
        keys = {f"{stem}_mode": mode, f"{stem}_clip_min": 0.5, f"{stem}_clip_max": None}
        got = coefficients(from_trl(keys), old=log_rho, mu=torch.zeros(2, 1), mask=torch.ones(2, 1))
        torch.testing.assert_close(got, torch.tensor([[math.e], [second]]))
