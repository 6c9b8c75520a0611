"""The quickstart's task with process rewards: chains whose steps are verified, and what is said of their utilities."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.quickstart import sums, warm_start
from scripts.quickstart.model import build_model
from scripts.quickstart.reward import FORCE_PROMPT, compute_score
from scripts.quickstart.sums import INSTRUCTION, StepUtilities, SumsSettings, ask, build_sums_tokenizer, list_questions
from scripts.quickstart.warm_start import SPREAD_OF_SUMS, SUMS, measure_right_steps, tokenize_prompts, warm_start_sums
from verl.utils.import_utils import load_extern_object

SETTINGS = SumsSettings()


def test_questions_are_held_out_and_the_same_every_time() -> None:
    found = sums.list_questions(SETTINGS)
    assert len(found["heldout"]) == 128
    assert len(set(found["heldout"]) | set(found["train"])) == 10**4 == len(found["heldout"]) + len(found["train"])
    assert found == sums.list_questions(SETTINGS)


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


def test_a_wrong_step_is_carried_on() -> None:
    text = sums.demonstrate((3, 3, 2, 3), random.Random(0), SumsSettings(wrong=1.0, at_once=0.0, early=0.0))
    assert sums.check_steps((3, 3, 2, 3), text.partition(FORCE_PROMPT)[0]) == [False]
    assert text.count("So ") == 2


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


@pytest.mark.parametrize("name", ["compute_score", "score_last_word"])
def test_rewards_are_loaded_by_verl_outside_their_package(name: str) -> None:
    path = Path(sums.__file__).with_name("reward.py")
    assert load_extern_object(module_path=str(path), object_name=name).__module__.startswith("custom_module")


def test_rows_have_verls_schema() -> None:
    row = sums.to_row((3, 3, 2, 3), 0, "train")
    assert row["reward_model"]["ground_truth"] == "1"
    assert sums.read_digits(f"<|user|>{row['prompt'][0]['content']}<|end|>") == (3, 3, 2, 3)


def test_utilities_are_sorted_by_their_steps() -> None:
    prompt = INSTRUCTION + "3 3 2 3"
    rows = [
        (prompt, f"3+3=1. So 1+2=4. So 4+3=2. {FORCE_PROMPT}2", [0.5, -2.0, 0.25]),
        (prompt, f"3+3=1. {FORCE_PROMPT}1", [-0.25]),
    ]
    found = sums.judge_utilities(rows)
    assert found == StepUtilities([0.5, -0.25], [-2.0])
    assert (found.separation, found.signed) == (1.0, 2 / 3)
    said = sums.describe_utilities(found, -1.63)
    assert "V_0 is -1.63 (log 1/5 is -1.61)" in said
    assert "right steps +0.12 (n = 2), of wrong ones -2.00 (n = 1); AUC 1.00; 67% of steps" in said
    assert math.isnan(StepUtilities([], []).separation)


def test_force_prompt_and_marker_are_tokens_of_their_own(tmp_path: Path) -> None:
    tokenizer = sums.build_sums_tokenizer()
    ids = tokenizer(f"3+3=1. So 1+2=3. {FORCE_PROMPT}3")["input_ids"]
    assert len(ids) == 7 + 1 + 7 + 1 + 1
    tokenizer.save_pretrained(tmp_path)
    import pandas

    recorded = {"prompt_ids": [tokenizer(INSTRUCTION + "3 3")["input_ids"]], "response_ids": [ids]}
    utility = [math.nan] * len(ids)
    utility[6] = 0.5
    pandas.DataFrame(recorded | {"offpolicy_process_utility": [utility]}).to_parquet(tmp_path / "step.parquet")
    (row,) = sums.read_recorded([tmp_path / "step.parquet"], tmp_path)
    assert row == (INSTRUCTION + "3 3", f"3+3=1. So 1+2=3. {FORCE_PROMPT}3", [0.5])


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
