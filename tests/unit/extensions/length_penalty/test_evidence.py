"""The second statement of penalties and baselines, by hand and next to the first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.extensions.length_penalty.penalties import (
    KINDS,
    Row,
    bound_error,
    compare_rewards,
    compute_shift,
    penalties,
    state_advantages,
    state_penalties,
    state_shift,
)
from recipe.offpolicy.extensions.length_penalty.settings import LengthSettings

ROWS = [Row(100, True, 1.0, 250), Row(200, False, 0.0, 250), Row(400, True, 1.0, 250), Row(500, False, 0.0, 250)]


def settings(kind: str, **values: object) -> LengthSettings:
    reference = {"reference": 250} if kind == "reference" else {}
    return LengthSettings.from_mapping("l", {"kind": kind, "coefficient": 0.001, **reference, **values})


@pytest.mark.parametrize("kind", KINDS)
def test_both_statements_agree(kind: str) -> None:
    lengths, right = torch.tensor([r.tokens for r in ROWS]), torch.tensor([r.right for r in ROWS])
    first = penalties(kind, lengths, right, coefficient=0.001, anchor=250)
    assert state_penalties(ROWS, settings(kind), 0.5) == pytest.approx((0.5 * first).tolist(), abs=1e-15)


def test_caps_and_choices() -> None:
    assert state_penalties(ROWS, settings("uniform", most=0.3), 1.0) == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert state_penalties(ROWS, settings("uniform", applies_to="correct"), 1.0) == pytest.approx([0.1, 0, 0.4, 0])
    equal = [row._replace(score=1.0) for row in ROWS]
    assert state_penalties(equal, settings("uniform", zero_variance="skip"), 1.0) == [0.0] * 4
    assert state_penalties([ROWS[0]._replace(anchor=None)], settings("anchor"), 1.0) == [0.0]


def test_shift_by_hand() -> None:
    """P 0.1, 0.2, 0.4, 0.5, mean 0.3; std of 1, 0, 1, 0 is sqrt(1/3)."""
    found = state_shift(ROWS, settings("uniform"), 1.0, by_std=False)
    assert found == pytest.approx([-0.2, -0.1, 0.1, 0.2])
    scaled = state_shift(ROWS, settings("uniform"), 1.0, by_std=True)
    assert scaled == pytest.approx([each / ((1 / 3) ** 0.5 + 1e-6) for each in found])


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=2, max_size=6), st.floats(-9, 0), st.floats(-3, 8))
def test_both_statements_of_the_shift_agree(steps: list[float], gap: float, size: float) -> None:
    """Scores that differ by shares 1e-9 to 1 of their size, 1e-3 to 1e8."""
    scores = (10**size * (1 - 10**gap * torch.tensor(steps, dtype=torch.float64) / 4)).float().double()
    rows = [Row(100 * at, True, score, None) for at, score in enumerate(scores.tolist())]
    stated = state_shift(rows, settings("uniform"), 1.0, by_std=True)
    penalty = torch.tensor(state_penalties(rows, settings("uniform"), 1.0), dtype=torch.float64)
    shift = compute_shift(penalty, scores, {"a": list(range(len(rows)))}, by_std=True)
    assert shift.tolist() == pytest.approx(stated, rel=1e-9, abs=1e-12)
    differ = compare_rewards(scores, {"a": list(range(len(rows)))})["a"]
    skipped = state_penalties(rows, settings("uniform", zero_variance="skip"), 1.0)
    assert skipped == pytest.approx((differ * penalty).tolist(), rel=1e-6, abs=1e-6)


def test_baselines_by_hand() -> None:
    assert state_advantages([1.0, 0, 0, 0], estimator="rloo", by_std=True) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert state_advantages([1.0, 0, 0, 0], estimator="grpo", by_std=False) == pytest.approx([0.75, *[-0.25] * 3])
    assert state_advantages([1.0, 0, 0, 0], estimator="grpo", by_std=True) == pytest.approx(
        [1.5, *[-0.5] * 3], abs=1e-5
    )
    assert state_advantages([2.0], estimator="grpo", by_std=True) == pytest.approx([2.0], abs=1e-5)
    assert state_advantages([2.0], estimator="rloo", by_std=False) == [2.0]


@pytest.mark.parametrize("spread", [1e-1, 1e-3, 1e-5])
def test_the_bound_covers_verls_arithmetic_in_float32(spread: float) -> None:
    rewards = (1 - spread * torch.arange(8) / 8).float()
    found = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    stated = state_advantages(rewards.tolist(), estimator="grpo", by_std=True)
    error = max(abs(a - b) for a, b in zip(found.tolist(), stated, strict=True))
    assert error < bound_error(rewards.tolist(), by_std=True) < 0.5


# What verl's loss_agg_mode makes of an advantage of 1 at rows of 4 and of 16 tokens: the pull of each token
