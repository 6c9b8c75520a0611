"""The task with answers of free length: demonstrations, reward, warm start, and what a run is started with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.quickstart import prepare, warm_start
from scripts.quickstart.free_length import ANCHOR, COEFFICIENTS, MOST_TOKENS, demonstrate_at_length
from scripts.quickstart.model import build_model, build_tokenizer
from scripts.quickstart.options import FREE_LENGTH_OVERRIDES, Options, build_task_overrides
from scripts.quickstart.reward import score_last_word
from scripts.quickstart.warm_start import TEACHER, WarmStart, warm_start_at_length

ENTRY = {"question": "Spell backward: cat", "answer": "tac", "metadata": {"word": "cat"}}


def test_the_last_word_is_scored() -> None:
    assert score_last_word("", "cat cat tac", "tac") == score_last_word("", "TAC", "tac") == 1.0
    assert score_last_word("", "tac cat", "tac") == score_last_word("", " ", "tac") == 0.0


def test_demonstrations_with_more_copies_are_right_more_often() -> None:
    """0.2 + 0.15 m: 0.2 without a copy, always from 6 on."""
    rng = random.Random(0)
    shown = [demonstrate_at_length(ENTRY, rng).split() for _ in range(4000)]
    assert {len(words) for words in shown} == set(range(1, 8))
    share = {m: [words[-1] == "tac" for words in shown if len(words) == m + 1] for m in (0, 3, 6)}
    assert sum(share[0]) / len(share[0]) == pytest.approx(0.2, abs=0.05)
    assert sum(share[3]) / len(share[3]) == pytest.approx(0.65, abs=0.06)
    assert all(share[6])
    assert max(len(" ".join(words)) for words in shown) < MOST_TOKENS


@pytest.mark.parametrize(("shares", "steps"), [([0, 1, 1], [2, 4]), ([0, 0, 0], [2, 4, 6])])
def test_the_warm_start_ends_when_enough_answers_are_right(
    shares: list[float], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, first, said = iter(shares), [], []
    monkeypatch.setattr(warm_start, "sample_texts", lambda *_: [f"tac {'tac' if next(found) else 'cat'}"])
    monkeypatch.setattr(warm_start, "warm_start", lambda *given: first.append(given[-1]))
    tokenizer = build_tokenizer("Spell backward:")
    settings = WarmStart(target=0.5, max_steps=6, every=2, checked=1)
    model = build_model(tokenizer)
    last = warm_start_at_length(model, tokenizer, [ENTRY] * 8, lambda *each: said.append(each), settings)
    assert [step for step, _, _ in said] == steps
    assert last == said[-1][2] == shares[len(steps) - 1]
    assert said[-1][1] < said[0][1]
    assert first == [TEACHER]


def test_texts_are_what_is_sampled_behind_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer("Spell backward:")
    model = build_model(tokenizer)

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        answers = [tokenizer(text)["input_ids"] for text in ("cat tac", "tac cat")]
        return torch.cat([input_ids, torch.tensor(answers)], -1)

    monkeypatch.setattr(model, "generate", generate)
    assert warm_start.sample_texts(model, tokenizer, [ENTRY["question"]] * 2, 8) == ["cat tac", "tac cat"]


def test_a_model_that_is_cached_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare.prepare_model(tmp_path, "free_length_model")
    assert "warm start at free length: skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([], ["length_penalty=none"]),
        (["length_penalty=null"], []),
        (["length_penalty=none"], []),
        (["length_penalty=uniform"], ["length_penalty.coefficient=0.002"]),
        (
            ["length_penalty=anchor", "length_penalty.place=before"],
            [
                "length_penalty.coefficient=0.1",
                *(f"length_penalty.anchor.{name}={value}" for name, value in ANCHOR.items()),
            ],
        ),
    ],
)
def test_a_penalty_gets_the_coefficient_of_the_task(given: list[str], added: list[str]) -> None:
    assert build_task_overrides(Options(None, "cpu", "free_length"), given) == [*FREE_LENGTH_OVERRIDES, *added]
    assert f"data.max_response_length={MOST_TOKENS}" in FREE_LENGTH_OVERRIDES
    assert set(COEFFICIENTS) == {"uniform", "group", "anchor"}
