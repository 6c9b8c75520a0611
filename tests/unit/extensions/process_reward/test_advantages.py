"""Utilities telescope; process advantages by hand, and what normalising by group does to them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.extensions.process_reward import token_advantages, utilities
from recipe.offpolicy.extensions.process_reward.advantages import normalize_utilities

U = torch.tensor([[9.0, 0.2, 9.0, -0.1], [9.0, 0.4, 9.0, 9.0]])
AT = torch.tensor([[False, True, False, True], [False, True, False, False]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def test_utilities_by_hand() -> None:
    assert utilities([-1.5, -1.0, -2.0]).tolist() == [0.5, -1.0]
    assert utilities(torch.tensor([-3.0])).tolist() == []
    for malformed in ([], [0.0, math.nan]):
        with pytest.raises(ValueError, match="one finite value for each episode"):
            utilities(malformed)


@given(st.lists(st.floats(-20, 0, width=32), min_size=1, max_size=17))
def test_utilities_telescope(values: list[float]) -> None:
    assert float(utilities(values).double().sum()) == pytest.approx(values[-1] - values[0], abs=1e-5)


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


def test_three_right_answers_that_gain_alike_are_scaled_to_1() -> None:
    u = torch.tensor([[1.6], [1.599], [1.598]])
    found = token_advantages(u, torch.ones(3, 1), ["a"] * 3, torch.ones(3, 1), normalize="scale")
    assert found.flatten().tolist() == pytest.approx([1.6 / 1.599, 1.0, 1.598 / 1.599], abs=1e-6)


def test_tokens_off_the_mask_pass_credit_on_and_get_none() -> None:
    """A tool's tokens stand in the middle."""
    u, at = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[False, False, False, True]])
    found = token_advantages(u, at, ["a"], torch.tensor([[1, 0, 0, 1]]), normalize="none")
    assert found.tolist() == [[1.0, 0.0, 0.0, 1.0]]


rows = st.lists(st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=2, max_size=4)


@given(rows, st.integers(0, 2), st.floats(0, 1))
def test_at_a_given_scale_an_inserted_boundary_changes_no_advantage_before_it(
    values: list[list[float]], place: int, share: float
) -> None:
    """An episode that ends at token 3 is split at an earlier one; its utility is shared between the two parts."""
    whole = torch.tensor(values).double()
    at = torch.zeros_like(whole, dtype=torch.bool)
    at[:, 3] = True
    whole[~at] = 0.0
    parts, split = whole.clone(), at.clone()
    parts[0, place], parts[0, 3] = share * whole[0, 3], (1 - share) * whole[0, 3]
    split[0, place] = True
    mask = torch.ones_like(whole)
    found = [token_advantages(u, p, [0] * len(whole), mask, normalize="none") for u, p in ((whole, at), (parts, split))]
    torch.testing.assert_close(found[0][0, : place + 1], found[1][0, : place + 1])
    scales = [u[p].square().mean().sqrt() for u, p in ((whole, at), (parts, split))]
    if min(scales) > 1e-3:
        scaled = [
            token_advantages(u, p, [0] * len(whole), mask, normalize="scale") * scale
            for (u, p), scale in zip(((whole, at), (parts, split)), scales, strict=True)
        ]
        torch.testing.assert_close(scaled[0][0, : place + 1], scaled[1][0, : place + 1])


@pytest.mark.parametrize("normalize", ["zscore", "scale"])
@given(values=rows)
def test_a_factor_of_all_utilities_changes_nothing(values: list[list[float]], normalize: str) -> None:
    u = torch.tensor(values).double().round(decimals=2)
    at, mask, groups = torch.ones_like(u, dtype=torch.bool), torch.ones_like(u), [0] * len(u)
    found = [token_advantages(factor * u, at, groups, mask, normalize=normalize) for factor in (1.0, 100.0)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_row_order_and_the_names_of_groups_change_nothing() -> None:
    u, groups = torch.tensor([[0.5, -1.0], [2.0, 0.25], [1.0, -3.0]]), ["a", "b", "a"]
    at, mask, order = torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 2), [2, 0, 1]
    found = token_advantages(u, at, groups, mask, normalize="zscore")
    moved = token_advantages(u[order], at[order], torch.tensor([7, 7, 9]), mask, normalize="zscore")
    torch.testing.assert_close(moved, found[order])


def test_what_does_not_fit_is_refused() -> None:
    nan = torch.where(AT, math.nan, U)
    for u, groups, how in ((U, ["a"], "scale"), (U, ["a", "a"], "mean"), (nan, ["a", "a"], "scale")):
        with pytest.raises(ValueError, match=r"expected \(B, T\)|normalize=mean|token 1 of row 0"):
            token_advantages(u, AT, groups, MASK, normalize=how)
