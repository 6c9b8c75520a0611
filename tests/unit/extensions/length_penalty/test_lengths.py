"""Lengths by correctness and difficulty, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.extensions.length_penalty.penalties import summarize_lengths


def test_by_hand() -> None:
    tokens = torch.tensor([10.0, 20, 30, 40, 5, 7])
    right = torch.tensor([True, True, True, False, False, False])
    found = summarize_lengths(tokens, right, {"a": [0, 1], "b": [2, 3], "c": [4, 5]})
    assert (found["right/mean"], found["right/p50"], found["right/sequences"]) == (20.0, 20.0, 3.0)
    assert found["right/p90"] == pytest.approx(28.0)
    assert (found["wrong/mean"], found["easy/mean"], found["hard/mean"]) == (pytest.approx(52 / 3), 15.0, 6.0)
    # Only b has both: lengths -5 and +5, marks +1/2 and -1/2; lengths of a and c vary as well: -5/sqrt(102 * 1/2).
    assert found["correlation"] == pytest.approx(-5 / math.sqrt((50 + 50 + 2) * 0.5))
