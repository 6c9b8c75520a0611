"""The quickstart's questions, their scores, and its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.quickstart import task
from scripts.quickstart.model import build_tokenizer
from scripts.quickstart.options import BUCKET, TASKS, Options, build_task_overrides
from scripts.quickstart.reward import compute_score

ARITHMETIC = Options(None, "cpu", "arithmetic")
SMALL = task.TaskSettings(heldout=256, train=64, warm_start=32)


@pytest.fixture(scope="module")
def parts() -> dict[str, list[task.Entry]]:
    return task.splits(SMALL)


def test_splits_have_their_sizes_and_share_no_question(parts):
    assert {name: len(entries) for name, entries in parts.items()} == {"heldout": 256, "train": 64, "warm_start": 32}
    questions = [entry["question"].casefold() for entries in parts.values() for entry in entries]
    assert len(set(questions)) == 256 + 64 + 32


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("nus", 1.0),
        (" NUS\n", 1.0),  # the scorer ignores case, ours ignores white space around the answer
        ("sun", 1 / 3),  # s u n against n u s: one letter of three stands in its place
        ("", 0.0),
    ],
)
def test_reward_is_reasoning_gyms_own(answer, score):
    extra = {"question": "Spell this word backward (example: sun -> nus): sun", "metadata": json.dumps({"word": "sun"})}
    found = compute_score("reasoning_gym/spell_backward", answer, "nus", extra)
    assert found == pytest.approx({"score": score, "acc": score, "exact": float(score == 1.0)})


def test_tokenizer_sees_every_letter_and_the_instruction_as_one_token(parts):
    instruction = task.get_instruction(parts["warm_start"])
    tokenizer = build_tokenizer(instruction)
    entry = parts["train"][0]
    word = entry["metadata"]["word"]
    chat = [{"role": "user", "content": entry["question"]}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    # <|user|>, the instruction, the letters, <|end|>, <|assistant|>
    assert len(ids) == len(word) + 4
    assert tokenizer.decode(ids) == f"<|user|>{entry['question']}<|end|><|assistant|>"
    assert tokenizer.decode(tokenizer("gnirrots!")["input_ids"]) == "gnirrots!"


# SmolLM2-135M-Instruct in the quickstart: its task, its reward, and what cannot stand next to it


@pytest.mark.parametrize("environment", [{"MODEL": "smollm2"}, {"TASK": "arithmetic"}])
def test_the_model_brings_its_task_and_the_task_its_model(environment: dict[str, str]) -> None:
    options = Options.read(environment, [])
    assert (options.model, options.task) == (None, "arithmetic")
    assert TASKS["arithmetic"].model == "smollm2"
    assert options.model_overrides == (f"{BUCKET}=128",)


def test_a_pretrained_model_gets_no_mask_that_drops_short_answers_and_no_rounded_updates() -> None:
    dtype, pretrained = "actor_rollout_ref.rollout.dtype", Options(Path("/model"), "cpu")
    assert build_task_overrides(pretrained, []) == ["correction=tis_token", f"{dtype}=float32"]
    assert build_task_overrides(Options(Path("/model"), "cuda"), []) == ["correction=tis_token"]
    assert build_task_overrides(pretrained, ["correction=gsm", f"{dtype}=bfloat16"]) == []
    assert f"{dtype}=float32" in build_task_overrides(ARITHMETIC, [])
