"""Which rollouts are distilled."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.extensions.opd import eligible
from recipe.offpolicy.extensions.opd.signal import compute_pass_rates, find_passed

ONE_OF_EIGHT = torch.tensor([0.0] * 7 + [1.0])


def test_pass_rates_by_hand() -> None:
    """Groups of rates 0, 1/8 and 1; a reward exactly at the bound does not pass."""
    rewards = torch.cat([torch.zeros(8), ONE_OF_EIGHT, torch.ones(2)])
    groups = ["none"] * 8 + ["one"] * 8 + ["all"] * 2
    rates = compute_pass_rates(rewards, groups, passed_above=0.0)
    assert rates.tolist() == [0.0] * 8 + [0.125] * 8 + [1.0] * 2
    assert compute_pass_rates(rewards, groups, passed_above=1.0).tolist() == [0.0] * 18


def test_failed_rollouts_of_hard_prompts() -> None:
    rewards = torch.cat([torch.zeros(8), ONE_OF_EIGHT, torch.tensor([0.0, 1.0])])
    groups = ["none"] * 8 + ["one"] * 8 + ["half"] * 2
    found = eligible(rewards, groups, passed_above=0.0, max_pass_rate=0.125)
    assert found.tolist() == [True] * 8 + [True] * 7 + [False] + [False, False]
    assert eligible(rewards, groups, passed_above=0.0, max_pass_rate=0.0).sum() == 8
    assert eligible(rewards, groups, passed_above=0.0, max_pass_rate=0.125, rows="all").sum() == 16


def test_a_reward_at_the_threshold_does_not_pass_in_float32_either() -> None:
    """0.3 in float32 is 0.30000001."""
    rewards = torch.tensor([0.3, 0.4]).double()
    assert find_passed(rewards, 0.3).tolist() == [False, True]
    assert eligible(rewards, ["a", "a"], passed_above=0.3, max_pass_rate=0.5).tolist() == [True, False]


def test_a_batch_of_nothing() -> None:
    assert eligible(torch.zeros(0), [], passed_above=0.0, max_pass_rate=0.5).tolist() == []


@pytest.mark.parametrize(
    ("rewards", "groups", "changes", "said"),
    [
        ([0.0, math.nan], ["a", "a"], {}, r"the reward of sequence 1 \(prompt a\) is nan"),
        ([0.0], ["a", "a"], {}, "for 2 groups"),
        ([0.0], ["a"], {"max_pass_rate": 1.5}, "max_pass_rate=1.5"),
        ([0.0], ["a"], {"passed_above": math.inf}, "passed_above=inf"),
        ([0.0], ["a"], {"rows": "some"}, "rows=some"),
    ],
)
def test_bad_input(rewards: list[float], groups: list[str], changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        eligible(torch.tensor(rewards), groups, **({"passed_above": 0.0, "max_pass_rate": 0.5} | changes))  # type: ignore[arg-type]
