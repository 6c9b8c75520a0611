"""The warm start on sums: what it measures, and when it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from scripts.quickstart import warm_start
from scripts.quickstart.model import build_model
from scripts.quickstart.sums import SumsSettings, ask, build_sums_tokenizer, list_questions
from scripts.quickstart.warm_start import SPREAD_OF_SUMS, SUMS, measure_right_steps, tokenize_prompts, warm_start_sums

TOKENIZER = build_sums_tokenizer()
CHECK_EVERY = SUMS.every
SHORT = replace(SUMS, batch=2, cooling=10, max_steps=2 * CHECK_EVERY)


def test_questions_are_as_long_as_their_digits() -> None:
    three, four = tokenize_prompts(TOKENIZER, [ask(digits) for digits in ((3, 3, 2), (3, 3, 2, 3))])
    assert len(four) - len(three) == 2  # a space and a digit


def test_the_share_of_right_steps_is_of_sampled_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chains of which three of four steps are right, the last of which ends its chain."""
    model = build_model(TOKENIZER)
    texts = ["3+3=1. So 1+2=3. So 3+3=1. </think>\n\nThe answer is 1", "3+3=2. So 2+2=4."]

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        answers = [TOKENIZER(text)["input_ids"] for text in texts]
        width = max(map(len, answers))
        padded = [answer + [TOKENIZER.pad_token_id] * (width - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(padded)], -1)

    monkeypatch.setattr(model, "generate", generate)
    assert measure_right_steps(model, TOKENIZER, [(3, 3, 2, 3)] * 2) == 3 / 4


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


@pytest.mark.slow
def test_it_learns() -> None:
    losses: list[float] = []
    settings = replace(SHORT, batch=24, target=2.0)
    warm_start_sums(
        build_model(TOKENIZER, spread=SPREAD_OF_SUMS),
        TOKENIZER,
        SumsSettings(heldout=10**4 - 64),
        lambda _step, loss, _share: losses.append(loss),
        settings,
    )
    assert losses[-1] < losses[0] < 4
    assert len(list_questions(SumsSettings(heldout=10**4 - 64))["train"]) == 64
