"""Turn-level advantages against hand-worked numbers, a float64 loop, and GRPO."""

from __future__ import annotations

import math
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.extensions.turn_credit.formula import compute_advantages, find_difference

NAN = math.nan
ROOT = 3**0.5
REWARDS = st.sampled_from([0.0, 1.0, 0.5, -2.0, 0.1])
ROLLOUTS = st.lists(st.tuples(st.lists(st.none() | REWARDS, max_size=4), REWARDS), min_size=1, max_size=5)


def compute(rows: list[list[float]], scores: list[float] | None, **how: object) -> list[list[float]]:
    width = max(map(len, rows), default=0)
    table = torch.full((len(rows), width), NAN, dtype=torch.float64)
    for at, row in enumerate(rows):
        table[at, : len(row)] = torch.tensor(row, dtype=torch.float64)
    counts = torch.tensor([len(row) for row in rows])
    ends = None if scores is None else torch.tensor(scores, dtype=torch.float64)
    found = compute_advantages(counts, table, ends, **how)  # type: ignore[arg-type]
    assert not bool(found[torch.arange(width) >= counts[:, None]].any())
    return [row[: len(given)] for row, given in zip(found.tolist(), rows, strict=True)]


@pytest.mark.parametrize(
    ("rows", "scores", "how", "wanted"),
    [
        # Returns of turn 0: 1, 0, 0; of turn 1: 1, 0. The third rollout has one turn.
        ([[NAN, NAN], [NAN, NAN], [NAN]], [1.0, 0.0, 0.0], {}, [[2 / 3, 0.5], [-1 / 3, -0.5], [-1 / 3]]),
        # Turn 0: 1 + 0.5 * 2 = 2 and 0 + 0.5 * 0 = 0; turn 1: 2 and 0.
        ([[1.0, NAN], [0.0, NAN]], [2.0, 0.0], {"gamma": 0.5}, [[1.0, 1.0], [-1.0, -1.0]]),
        # Without the rollout's reward, the last turn earns nothing.
        ([[1.0, NAN], [0.0, NAN]], None, {"coef": 3.0}, [[1.5, 0.0], [-1.5, 0.0]]),
        # Only one rollout has a second turn.
        ([[NAN, NAN], [NAN]], [4.0, 0.0], {}, [[2.0, 0.0], [-2.0]]),
        # Tools: 1, 0, 0, 1 have mean 1 / 2; rollouts: 3 and 1 have mean 2.
        (
            [[1.0, 0.0, NAN], [0.0, 1.0, NAN]],
            [3.0, 1.0],
            {"normalize": "return_to_go"},
            [[1.0, 0.5, 1.0], [-1.0, -0.5, -1.0]],
        ),
        # The same, divided: tools by 1 / sqrt(3), rollouts by sqrt(2), and discounted by 1 / 2 per turn.
        (
            [[1.0, 0.0, NAN], [0.0, 1.0, NAN]],
            [3.0, 1.0],
            {"normalize": "return_to_go", "by_std": True, "gamma": 0.5},
            [
                [ROOT / 2 - ROOT / 4 + 0.5**0.5 / 4, -ROOT / 2 + 0.5**0.5 / 2, 0.5**0.5],
                [-ROOT / 2 + ROOT / 4 - 0.5**0.5 / 4, ROOT / 2 - 0.5**0.5 / 2, -(0.5**0.5)],
            ],
        ),
        # Equal rewards, and a rollout without a turn.
        ([[0.1], [0.1], [0.1], []], [0.1, 0.1, 0.1, 7.0], {"by_std": True}, [[0.0], [0.0], [0.0], []]),
    ],
)
def test_by_hand(
    rows: list[list[float]], scores: list[float] | None, how: dict[str, object], wanted: list[list[float]]
) -> None:
    found = compute(rows, scores, **{"normalize": "turn_index", "by_std": False, **how})
    for row, one in zip(found, wanted, strict=True):
        assert row == pytest.approx(one, abs=1e-12)


def standardise(values: list[float], by_std: bool) -> list[float]:
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    return [(value - mean(values)) / (stdev(values) if by_std else 1.0) for value in values]


@pytest.mark.parametrize("normalize", ["turn_index", "return_to_go"])
@given(rollouts=ROLLOUTS, by_std=st.booleans(), gamma=st.sampled_from([1.0, 0.5]), episode=st.booleans())
def test_it_is_the_loop_in_float64(
    normalize: str, rollouts: list[tuple[list[float | None], float]], by_std: bool, gamma: float, episode: bool
) -> None:
    rows = [[NAN if each is None else each for each in row] for row, _ in rollouts]
    scores = [score for _, score in rollouts] if episode else None
    how = {"normalize": normalize, "coef": 2.0, "gamma": gamma, "by_std": by_std}
    found = compute(rows, scores, **how)
    assert find_difference(found, rows, scores, **how) is None  # type: ignore[arg-type]
    earned = [[0.0 if math.isnan(each) else each for each in row] for row in rows]
    ends = scores or [0.0] * len(rows)
    if normalize == "return_to_go":
        paid = [(i, k) for i, row in enumerate(rows) for k, each in enumerate(row) if not math.isnan(each)]
        for (i, k), value in zip(paid, standardise([rows[i][k] for i, k in paid], by_std), strict=True):
            earned[i][k] = value
        there = [i for i, row in enumerate(rows) if row]
        ends = dict(zip(there, standardise([ends[i] for i in there], by_std), strict=True))  # type: ignore[assignment]
    returns = [
        [
            sum(
                gamma ** (at - k) * (2.0 * row[at] + (ends[i] if at == len(row) - 1 else 0.0))
                for at in range(k, len(row))
            )
            for k in range(len(row))
        ]
        for i, row in enumerate(earned)
    ]
    if normalize == "turn_index":
        for k in range(max(map(len, rows))):
            members = [i for i, row in enumerate(rows) if len(row) > k]
            values = standardise([round(returns[i][k], 12) for i in members], by_std)
            for i, value in zip(members, values, strict=True):
                returns[i][k] = value
    for row, one in zip(found, returns, strict=True):
        assert row == pytest.approx(one, abs=1e-6)


def test_another_advantage_is_found() -> None:
    rows, scores = [[1.0, NAN], [0.0, NAN]], [2.0, 0.0]
    how = {"normalize": "turn_index", "coef": 1.0, "gamma": 1.0, "by_std": False}
    found = compute(rows, scores, **how)
    found[1][0] += 1e-4
    said = find_difference(found, rows, scores, **how)  # type: ignore[arg-type]
    assert said == "turn 0 of rollout 1 of 2 has -1.4999, but turn_index requires -1.5"
