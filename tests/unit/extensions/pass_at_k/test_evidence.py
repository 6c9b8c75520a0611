"""The second statement agrees with the first on every group, and with no other."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.extensions.pass_at_k import advantages
from recipe.offpolicy.extensions.pass_at_k.evidence import find_difference, state_none_right
from recipe.offpolicy.extensions.pass_at_k.training import OBJECTIVES, find_impossible


def test_none_of_k_drawn() -> None:
    for n in range(1, 12):
        for c in range(n + 1):
            for k in range(n + 1):
                assert state_none_right(n, c, k) == pytest.approx(math.comb(n - c, k) / math.comb(n, k), abs=1e-15)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_both_agree_on_every_group(objective: str) -> None:
    for n in (2, 6, 8, 12):
        for c in range(n + 1):
            right = (torch.arange(n) < c).tolist()
            for k in range(1, n + 1):
                if find_impossible(n, k, objective) is None:
                    found = advantages(right, k, objective=objective, seed=c)
                    assert find_difference(found.float().tolist(), right, k, objective) is None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_another_value_is_named(objective: str) -> None:
    right = [True, *[False] * 7]
    found = advantages(right, 4, objective=objective).tolist()
    found[5] += 1e-3
    assert "rollout 5 of 8" in (find_difference(found, right, 4, objective) or "")


def test_a_right_row_below_the_mean_is_no_deal() -> None:
    right = [True, *[False] * 7]
    assert find_difference([-0.5, *[0.5] * 4, *[-0.5] * 3], right, 4, "groups") is not None
