"""Utilities telescope; process advantages by hand, and what normalising by group does to them."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.extensions.process_reward.utilities import normalize_utilities, token_advantages

U = torch.tensor([[9.0, 0.2, 9.0, -0.1], [9.0, 0.4, 9.0, 9.0]])
AT = torch.tensor([[False, True, False, True], [False, True, False, False]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def test_zscore_punishes_progress_that_is_slower_than_its_siblings() -> None:
    """Of 0.2, -0.1 and 0.4: mean 0.1667, std 0.2517; the first row gains 0.1 nats."""
    found = token_advantages(U, AT, ["a", "a"], MASK, normalize="zscore")
    assert found[0].tolist() == pytest.approx([-0.927, -0.927, -1.060, -1.060], abs=5e-4)
    assert found[1].tolist() == pytest.approx([0.927, 0.927, 0.0, 0.0], abs=5e-4)


def test_scale_keeps_the_sign_of_progress() -> None:
    """Of 0.2, -0.1 and 0.4: root mean square sqrt(0.07)."""
    found = token_advantages(U, AT, ["a", "a"], MASK, normalize="scale")
    assert found[0].tolist() == pytest.approx([0.378, 0.378, -0.378, -0.378], abs=5e-4)
    assert found[1].tolist() == pytest.approx([1.512, 1.512, 0.0, 0.0], abs=5e-4)


def test_none_leaves_utilities_as_they_are() -> None:
    found = token_advantages(U, AT, ["a", "b"], MASK, normalize="none")
    assert found.tolist() == [pytest.approx([0.1, 0.1, -0.1, -0.1]), pytest.approx([0.4, 0.4, 0.0, 0.0])]


def test_a_utility_of_0_counts_and_one_elsewhere_does_not() -> None:
    """Of 0, 1 and -1 at positions: std 1."""
    u = torch.tensor([[0.0, 1.0, 5.0], [-1.0, 5.0, 5.0]])
    at = torch.tensor([[True, True, False], [True, False, False]])
    assert normalize_utilities(u, at, ["a", "a"], normalize="zscore").tolist() == [[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]]


def test_groups_without_a_deviation() -> None:
    """Nothing after centring; their scale is that of the utilities themselves."""
    u = torch.tensor([[0.3, 0.3], [0.7, 9.0], [1.0, -1.0]])
    at = torch.tensor([[True, True], [True, False], [True, True]])
    centred, scaled = (
        normalize_utilities(u, at, ["same", "one", "two"], normalize=how).tolist() for how in ("zscore", "scale")
    )
    assert centred == [[0.0, 0.0], [0.0, 0.0], pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)])]
    assert scaled == [pytest.approx([1.0, 1.0]), pytest.approx([1.0, 0.0]), pytest.approx([1.0, -1.0])]


def test_tokens_off_the_mask_pass_credit_on_and_get_none() -> None:
    """A tool's tokens stand in the middle."""
    u, at = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[False, False, False, True]])
    found = token_advantages(u, at, ["a"], torch.tensor([[1, 0, 0, 1]]), normalize="none")
    assert found.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_what_does_not_fit_is_refused() -> None:
    nan = torch.where(AT, math.nan, U)
    for u, groups, how in ((U, ["a"], "scale"), (U, ["a", "a"], "mean"), (nan, ["a", "a"], "scale")):
        with pytest.raises(ValueError, match=r"expected \(B, T\)|normalize=mean|token 1 of row 0"):
            token_advantages(u, AT, groups, MASK, normalize=how)
