"""The quickstart's task with process rewards: chains whose steps are verified, and the statements about their
utilities.
"""

from __future__ import annotations

import random

import pytest

from scripts.quickstart import sums
from scripts.quickstart.reward import FORCE_PROMPT, compute_score
from scripts.quickstart.sums import SumsSettings


def test_a_demonstration_without_errors_is_right() -> None:
    careful = SumsSettings(wrong=0.0, at_once=0.0, early=0.0)
    text = sums.demonstrate((3, 3, 2, 3), random.Random(0), careful)
    assert text == f"3+3=1. So 1+2=3. So 3+3=1. {FORCE_PROMPT}1"
    assert sums.check_steps((3, 3, 2, 3), text.partition(FORCE_PROMPT)[0]) == [True, True, True]
    early = [
        sums.demonstrate((3, 3, 2, 3), random.Random(seed), SumsSettings(wrong=0.0, at_once=0.3, early=0.7))
        for seed in range(9)
    ]
    assert all(text.endswith(f"{FORCE_PROMPT}1") for text in early)
    assert any(text == f"{FORCE_PROMPT}1" for text in early)


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        ("3+3=1. So 1+2=4. So 4+3=2. ", [True, False]),
        ("3+3=1. So 2+2=4. ", [True, False]),
        ("3+3=1. then", []),
    ],
)
def test_steps_are_verified_up_to_the_first_wrong_one(text: str, verdicts: list[bool]) -> None:
    assert sums.check_steps((3, 3, 2, 3), text) == verdicts


@pytest.mark.parametrize(
    ("text", "score"),
    [(f"3+3=1. {FORCE_PROMPT}1", 1.0), (f"{FORCE_PROMPT}2", 0.0), ("1", 0.0), (f"{FORCE_PROMPT}1 1", 0.0)],
)
def test_the_score_is_that_of_the_answer(text: str, score: float) -> None:
    assert compute_score("sums", text, "1") == score
