"""A tabular policy over six lengths, one easy and one hard prompt that share it: where a penalty makes length collapse.

The shape of the article's finding, before normalisation within the group: uniform and group penalties shorten answers
until the hard prompt is never solved, and an anchor keeps the easy one. After normalisation none of them does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from recipe.offpolicy.extensions.length_penalty.penalties import Anchors, compute_shift, penalties

pytestmark = [pytest.mark.slow, pytest.mark.extended]

LENGTHS = np.array([0, 100, 200, 400, 800, 1200])
SOLVED = {"easy": np.array([0, 0.6, 0.9, 0.95, 0.95, 0.95]), "hard": np.array([0, 0, 0.02, 0.05, 0.15, 0.25])}
START = np.array([0, 0.5, 1, 1, 0, -0.5])
COEFFICIENT = {"none": 0.0, "uniform": 1e-4, "group": 0.1, "anchor": 0.01}
STEPS, RATE, ROWS = 3000, 0.05, 8


class End(NamedTuple):
    """Result of training: mean length, and share of correct answers."""

    tokens: float
    easy: float
    hard: float


def train(kind: str, place: str, seed: int = 0) -> End:
    """Train GRPO by verl's formula, with std."""
    random = np.random.default_rng(seed)
    shared, anchors = np.zeros(len(LENGTHS)), Anchors(pass_rate=0.9, min_samples=8, window=8)

    def policy() -> np.ndarray:
        chances = np.exp(START + shared - (START + shared).max())
        return chances / chances.sum()

    for step in range(STEPS):
        gradient = np.zeros_like(shared)
        for prompt, solved in SOLVED.items():
            chances = policy()
            chosen = random.choice(len(LENGTHS), ROWS, p=chances)
            tokens = LENGTHS[chosen].astype(float)
            right = random.random(ROWS) < solved[chosen]
            lost = torch.zeros(ROWS, dtype=torch.float64)
            if kind != "none":
                if kind == "anchor":
                    anchors.add(step, zip([prompt] * ROWS, right.tolist(), tokens.tolist(), strict=True))
                lost = penalties(
                    kind,
                    torch.tensor(tokens),
                    torch.tensor(right),
                    coefficient=COEFFICIENT[kind],
                    anchor=anchors.length_of(prompt),
                )
            rewards = right - lost.numpy() if place == "before" else right.astype(float)
            advantage = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            if place == "after":
                groups = {prompt: list(range(ROWS))}
                advantage -= compute_shift(lost, torch.tensor(right).double(), groups, by_std=True).numpy()
            gradient += (np.bincount(chosen, advantage, len(LENGTHS)) - advantage.sum() * chances) / ROWS
        shared += RATE * gradient
    chances = policy()
    return End(float(chances @ LENGTHS), *(float(chances @ solved) for solved in SOLVED.values()))


def test_where_length_collapses() -> None:
    """Before normalisation, an anchor depends on the first group whose answers are all correct, so there are five
    seeds.
    """
    none = train("none", "after")
    assert (none.tokens > 1000, none.hard > 0.2) == (True, True)
    for kind in ("uniform", "group"):
        found = train(kind, "before")
        assert found.tokens < 0.25 * none.tokens, kind
        assert (found.hard < 0.02, found.easy < 0.75) == (True, True), kind
    anchored = [train("anchor", "before", seed) for seed in range(5)]
    assert np.mean([end.easy for end in anchored]) > 0.9
    assert min(end.easy for end in anchored) > 0.85
    assert max(end.tokens for end in anchored) < none.tokens
    for kind in ("uniform", "group", "anchor"):
        found = train(kind, "after")
        assert found.tokens > 0.5 * none.tokens, kind
        assert (found.easy > 0.9, found.hard > 0.1) == (True, True), kind
