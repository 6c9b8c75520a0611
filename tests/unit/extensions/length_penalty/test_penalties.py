"""Each penalty by hand on one group, anchors, lengths, and a second implementation of all of them."""

from __future__ import annotations

import json
import math
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.extensions.length_penalty.penalties import (
    Anchor,
    Anchors,
    bound_error,
    compute_shift,
    penalties,
    state_advantages,
    summarize_lengths,
)

LENGTHS, RIGHT = [100, 200, 400, 500], [True, False, True, False]


@pytest.mark.parametrize(
    ("kind", "coefficient", "anchor", "wanted"),
    [
        ("uniform", 1e-3, None, [0.1, 0.2, 0.4, 0.5]),
        # lam = 1/2 - (T - 100) / 400 = 0.5, 0.25, -0.25, -0.5; the short wrong row gets nothing.
        ("group", 0.1, None, [-0.05, 0.0, 0.025, 0.05]),
        ("anchor", 0.1, 250, [0.0, 0.0, 0.06, 0.1]),
        ("reference", 0.1, 250, [0.0, 0.0, 0.06, 0.1]),
        ("anchor", 0.1, None, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_by_hand(kind: str, coefficient: float, anchor: float | None, wanted: list[float]) -> None:
    found = penalties(kind, torch.tensor(LENGTHS), torch.tensor(RIGHT), coefficient=coefficient, anchor=anchor)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(wanted)


# Before normalisation the coefficient cancels where all rewards are equal; after it, it is a factor


# Lengths by correctness and difficulty, by hand


def test_lengths_by_hand() -> None:
    tokens = torch.tensor([10.0, 20, 30, 40, 5, 7])
    right = torch.tensor([True, True, True, False, False, False])
    found = summarize_lengths(tokens, right, {"a": [0, 1], "b": [2, 3], "c": [4, 5]})
    assert (found["right/mean"], found["right/p50"], found["right/sequences"]) == (20.0, 20.0, 3.0)
    assert found["right/p90"] == pytest.approx(28.0)
    assert (found["wrong/mean"], found["easy/mean"], found["hard/mean"]) == (pytest.approx(52 / 3), 15.0, 6.0)
    # Only b has both: lengths -5 and +5, marks +1/2 and -1/2; lengths of a and c vary as well: -5/sqrt(102 * 1/2).
    assert found["correlation"] == pytest.approx(-5 / math.sqrt((50 + 50 + 2) * 0.5))


# Anchors are frozen once, from right answers alone, and survive a checkpoint


def make(**changes: float) -> Anchors:
    return Anchors(**{"pass_rate": 0.9, "min_samples": 16, "window": 64} | changes)  # type: ignore[arg-type]


def answers(right: int, wrong: int, tokens: float = 10.0) -> list[tuple[str, bool, float]]:
    return [("p", True, tokens)] * right + [("p", False, 1000.0)] * wrong


def test_the_share_has_to_exceed_the_rate_and_wrong_answers_have_no_length() -> None:
    """9 of 10 does not exceed 0.9, but 28 of 30 does, and the anchor is the mean length of the 28."""
    anchors = make(min_samples=10)
    assert anchors.add(1, answers(9, 1)) == 0
    assert anchors.add(2, answers(19, 1, tokens=20.0)) == 1
    assert anchors.frozen["p"] == Anchor((9 * 10 + 19 * 20) / 28, 2, 28)


def test_steps_leave_the_window_whole() -> None:
    """With a window of 8, the first of three steps of 4 answers has left, and 8 of 8 are correct."""
    anchors = make(min_samples=8, window=8)
    anchors.add(1, answers(0, 4))
    assert anchors.add(2, answers(4, 0)) == 0
    assert anchors.add(3, answers(4, 0, tokens=30.0)) == 1
    assert anchors.length_of("p") == 20.0


def test_a_checkpoint_half_way_gives_the_same_state() -> None:
    whole, first = make(), make()
    for anchors in (whole, first):
        anchors.add(1, [*answers(8, 1), ("q", True, 5.0)])
    second = make()
    second.restore(json.loads(json.dumps(first.to_json())))
    for anchors in (whole, second):
        anchors.add(2, answers(12, 0, tokens=7.0))
    assert second.to_json() == whole.to_json()
    assert second.frozen == whole.frozen
    assert second.length_of("p") == (8 * 10 + 12 * 7) / 20


# The shift against a second implementation, and verl's baselines


def state_shift(lost: list[float], scores: list[float]) -> list[float]:
    """Compute shifts that are divided like verl's advantages, limited to the largest advantage and the largest
    undivided shift.
    """
    middle, deviation = mean(scores), stdev(scores)
    rounding = 8 * 2.0**-23 * max(2.0**-126, *map(abs, scores))
    differ = min(1.0, max(0.0, deviation / rounding - 1))
    apart = [each - mean(lost) for each in lost]
    whole = [each / (deviation + 1e-6) for each in apart]
    largest = differ * max(abs(each - middle) for each in scores) / (deviation + 1e-6)
    shrink = min(1.0, max(largest, *map(abs, apart)) / max(map(abs, whole)))
    return [differ * shrink * one + (1 - differ) * other for one, other in zip(whole, apart, strict=True)]


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=2, max_size=6),
    st.floats(-9, 0),
    st.floats(-3, 8),
    st.sampled_from([0.1, 30.0]),
)
def test_the_shift_is_divided_as_far_as_rewards_differ(
    steps: list[float], gap: float, size: float, each: float
) -> None:
    """Scores that differ by 1e-9 to 1 times their size, from 1e-3 to 1e8; penalties that differ by less or more."""
    scores = (10**size * (1 - 10**gap * torch.tensor(steps, dtype=torch.float64) / 4)).float().double()
    penalty = each * torch.arange(len(steps), dtype=torch.float64)
    shift = compute_shift(penalty, scores, {"a": list(range(len(steps)))}, by_std=True)
    assert shift.tolist() == pytest.approx(state_shift(penalty.tolist(), scores.tolist()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("spread", [1e-1, 1e-3, 1e-5])
def test_the_bound_covers_verls_arithmetic_in_float32(spread: float) -> None:
    rewards = (1 - spread * torch.arange(8) / 8).float()
    found = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    stated = state_advantages(rewards.tolist(), estimator="grpo", by_std=True)
    error = max(abs(a - b) for a, b in zip(found.tolist(), stated, strict=True))
    assert error < bound_error(rewards.tolist(), by_std=True) < 0.5
