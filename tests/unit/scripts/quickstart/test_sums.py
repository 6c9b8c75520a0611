"""The quickstart's task with process rewards: chains whose steps are verified, and what is said of their utilities."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from scripts.quickstart import sums, warm_start
from scripts.quickstart.model import build_model
from scripts.quickstart.reward import FORCE_PROMPT, compute_score
from scripts.quickstart.sums import SumsSettings, build_sums_tokenizer
from scripts.quickstart.warm_start import SUMS, warm_start_sums


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
        ("", []),
        ("3+3=1. So 1+2=3. So 3+3=1. So 1+1=2. ", [True, True, True]),
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


TOKENIZER = build_sums_tokenizer()
CHECK_EVERY = SUMS.every
SHORT = replace(SUMS, batch=2, cooling=10, max_steps=2 * CHECK_EVERY)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "steps", "met"), [(0.9, CHECK_EVERY + 10, True), (0.1, 2 * CHECK_EVERY, False)])
def test_it_ends_when_the_rate_has_fallen_to_nothing(
    monkeypatch: pytest.MonkeyPatch, share: float, steps: int, met: bool
) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def note(optimizer: torch.optim.AdamW, *args: Any) -> Any:
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    monkeypatch.setattr(warm_start, "measure_right_steps", lambda *_: share)
    said: list[tuple[int, float, float]] = []
    model = build_model(TOKENIZER)
    found = warm_start_sums(model, TOKENIZER, SumsSettings(), lambda *each: said.append(each), SHORT)
    assert (found >= SHORT.target) is met
    assert len(rates) == steps
    assert rates[CHECK_EVERY - 1] == SHORT.learning_rate
    assert rates[-1] == pytest.approx(0.0 if met else SHORT.learning_rate)
    assert said[0][0] == CHECK_EVERY
    assert said[0][2] == share
