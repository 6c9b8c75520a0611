"""The baseline against a float64 loop, its variance by enumeration, and its bias."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.extensions.optimal_baseline.formula import compute_advantages, find_difference

GROUPS = st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 1e6) | st.just(5e-324)), min_size=1, max_size=9)
LEAVE_ONE_OUT = pytest.mark.parametrize("leave_one_out", [False, True])


def state(rewards: list[float], energy: list[float], leave_one_out: bool) -> list[float]:
    found = []
    for i, reward in enumerate(rewards):
        pairs = [(e, r) for j, (e, r) in enumerate(zip(energy, rewards, strict=True)) if j != i or not leave_one_out]
        whole = sum(e for e, _ in pairs)
        found.append(reward - sum(e / whole * r for e, r in pairs) if whole > 0 else 0.0)
    return found


@LEAVE_ONE_OUT
@given(group=GROUPS)
def test_it_is_the_loop_in_float64(leave_one_out: bool, group: list[tuple[float, float]]) -> None:
    rewards, energy = (list(column) for column in zip(*group, strict=True))
    found = compute_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(energy, dtype=torch.float64),
        leave_one_out=leave_one_out,
    )
    assert find_difference(found.tolist(), rewards, energy, leave_one_out=leave_one_out) is None
    if max(energy) > 1e-300 and not leave_one_out:
        assert found.tolist() == pytest.approx(state(rewards, energy, leave_one_out), abs=1e-11)


@pytest.mark.parametrize(
    ("rewards", "energy", "of_group", "of_others"),
    [
        ([1.0, 0.0, 0.0], [1.0, 2.0, 1.0], [0.75, -0.25, -0.25], [1.0, -0.5, -1 / 3]),
        ([3.0], [2.0], [0.0], [0.0]),
        ([1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
        ([1.0, 0.0], [5e-324, 0.0], [0.0, -1.0], [0.0, -1.0]),
        ([0.1, 0.1, 0.1], [0.3, 1e-12, 7.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    ],
)
def test_by_hand(rewards: list[float], energy: list[float], of_group: list[float], of_others: list[float]) -> None:
    given = torch.tensor(rewards).double(), torch.tensor(energy, dtype=torch.float64)
    assert compute_advantages(*given, leave_one_out=False).tolist() == pytest.approx(of_group)
    assert compute_advantages(*given, leave_one_out=True).tolist() == pytest.approx(of_others)


def enumerate_toy() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All sequences of two tokens of three: probability under mu, weight pi / mu, score and reward of each."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, generator=generator).double()
    pi, mu = logits.softmax(0), (logits + 0.7 * torch.randn(3, generator=generator).double()).softmax(0)
    pairs = list(itertools.product(range(3), repeat=2))
    scores = torch.stack([sum((torch.eye(3).double()[t] - pi for t in pair), torch.zeros(3)) for pair in pairs])
    of_mu = torch.stack([mu[list(pair)].prod() for pair in pairs])
    weight = torch.stack([pi[list(pair)].prod() for pair in pairs]) / of_mu
    return of_mu, weight, scores, torch.randn(9, generator=generator).double() + 2


def test_no_other_constant_has_less_variance() -> None:
    """With all sequences as the group, each in proportion to mu, its energy is E[w^2 |score|^2]."""
    of_mu, weight, scores, rewards = enumerate_toy()
    energy = of_mu * (weight[:, None] * scores).square().sum(-1)
    best = float(rewards[0] - compute_advantages(rewards, energy, leave_one_out=False)[0])

    def variance(baseline: float) -> float:
        gradient = (weight * (rewards - baseline))[:, None] * scores
        mean = (of_mu[:, None] * gradient).sum(0)
        return float((of_mu * (gradient - mean).square().sum(-1)).sum())

    others = [best + float(shift) for shift in torch.linspace(-4, 4, 200)]
    assert all(variance(best) <= variance(other) for other in others)
    assert variance(best) < 0.5 * variance(0.0)
    # The plain mean of the rewards, and that under mu, are not it.
    assert variance(best) < min(variance(float(rewards.mean())), variance(float((of_mu * rewards).sum())))


@LEAVE_ONE_OUT
def test_the_mean_gradient_is_exact_only_without_ones_own_reward(leave_one_out: bool) -> None:
    """Groups of two: with its own reward a group's gradient is (1 - 1 / 2) of it for equal energies, else biased."""
    of_mu, weight, scores, rewards = enumerate_toy()
    energy = (weight[:, None] * scores).square().sum(-1)
    wanted = (of_mu * weight * rewards) @ scores
    for energies, share in ((torch.ones_like(energy), 0.5), (energy, None)):
        mean = torch.zeros(3).double()
        for pair in itertools.product(range(9), repeat=2):
            at = torch.tensor(pair)
            dealt = compute_advantages(rewards[at], energies[at], leave_one_out=leave_one_out)
            mean += of_mu[at].prod() * ((weight[at] * dealt) @ scores[at]) / 2
        if leave_one_out:
            torch.testing.assert_close(mean, wanted, atol=1e-12, rtol=0)
        elif share is not None:
            torch.testing.assert_close(mean, share * wanted, atol=1e-12, rtol=0)
        else:
            assert float((mean - wanted).abs().max()) > 1e-3
