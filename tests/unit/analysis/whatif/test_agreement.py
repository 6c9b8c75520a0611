"""Agreement between corrections, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recipe.offpolicy.analysis.whatif.measures import Agreement, compare_pairs, compute_agreement

YES, NO = True, False
# Two rows of four tokens; the last token of row 1 is not compared.
COUNTED = torch.tensor([[YES, YES, YES, YES], [YES, YES, YES, NO]])
ONE = torch.tensor([[NO, NO, YES, YES], [NO, NO, NO, NO]])  # rejects 2 + 3 of 7 tokens, and row 1
OTHER = torch.tensor([[NO, YES, YES, NO], [NO, NO, NO, YES]])  # rejects 2 + 3, and row 1
ALL = torch.ones(2, 4, dtype=torch.bool)


def agreement_of(*keep: torch.Tensor, weighed: list[torch.Tensor] | None = None) -> Agreement:
    return compute_agreement(compare_pairs(keep, weighed or [one.double() for one in keep], COUNTED))


def test_jaccard() -> None:
    agreement = agreement_of(ONE, OTHER, ALL)
    # Both reject tokens 0 of row 0 and 0 to 2 of row 1: 4; either: tokens 0, 1, 3 of row 0 and those: 6.
    assert agreement.jaccard_tokens[0, 1] == pytest.approx(4 / 6)
    assert agreement.jaccard_rows[0, 1] == 1.0
    # Against what rejects nothing: nothing in common.
    assert agreement.jaccard_tokens[0, 2] == 0.0
    assert math.isnan(agreement.jaccard_tokens[2, 2])
    for matrix in (agreement.jaccard_tokens, agreement.cosine):
        np.testing.assert_array_equal(matrix, matrix.T)


def test_cosine() -> None:
    """(1, 1) against (1, 0): 1 / sqrt 2; and what has no gradient has no direction."""
    one = torch.tensor([[1.0, 1.0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    other = torch.tensor([[3.0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    agreement = agreement_of(ALL, ALL, ALL, weighed=[one, other, one * 0])
    assert agreement.cosine[0, 1] == pytest.approx(math.sqrt(0.5))
    assert agreement.cosine[0, 0] == pytest.approx(1.0)
    assert math.isnan(agreement.cosine[0, 2])


def test_nothing_compared() -> None:
    empty = compute_agreement(np.zeros((3, 2, 2)))
    assert all(np.isnan(matrix).all() for matrix in vars(empty).values())
    assert compute_agreement(np.zeros((3, 0, 0))).cosine.shape == (0, 0)
