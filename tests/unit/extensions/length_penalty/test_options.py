"""Answers out of the loss, prompts out of the data, and classes that an early checkpoint fixes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from omegaconf import OmegaConf

from recipe.offpolicy.extensions.length_penalty.left_out import EasierPrompts
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.length_penalty.settings import LEAVE_OUT
from recipe.offpolicy.proof.verify import LivenessError
from scripts.quickstart.model import build_tokenizer
from tests.support import judged
from tests.support.shaped import Rows, make_batch, report, shape

CUT: Rows = [("a", 12, 0.0), ("a", 4, 1.0), ("a", 6, 1.0), ("a", 8, 0.0), ("b", 12, 1.0), ("b", 3, 1.0)]
"""Two answers of 12 tokens, the maximum."""


def penalty(kind: str = "none", **settings: Any) -> LengthPenalty:
    made = LengthPenalty("length_penalty", {"kind": kind, "truncated": "drop"} | settings)
    made.begin(OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}, "data": {"max_response_length": 12}}))
    return made


def test_dropped_answers_have_no_advantage_and_stay_in_their_groups_statistics() -> None:
    """Rewards 0, 1, 1, 0: mean 1/2, standard deviation sqrt(1/3); the first row would have -sqrt(3)/2."""
    found = shape(make_batch(CUT), made := penalty())
    each = 0.5 / ((1 / 3) ** 0.5 + 1e-6)
    assert found.tolist() == pytest.approx([0.0, each, each, -each, 0.0, 0.0])
    assert made.metrics()["length/dropped_sequences"] == 2.0
    kept = shape(make_batch(CUT), penalty(truncated="keep"))
    assert kept.tolist() == pytest.approx([-each, each, each, -each, 0.0, 0.0])


@pytest.mark.parametrize("place", ["after", "before"])
def test_the_penalty_of_other_answers_is_as_without_dropping(place: str) -> None:
    found = shape(make_batch(CUT), made := penalty("uniform", place=place, coefficient=0.02))
    kept = shape(make_batch(CUT), penalty("uniform", place=place, coefficient=0.02, truncated="keep"))
    assert found[[0, 4]].tolist() == [0.0, 0.0]
    assert torch.equal(found[[1, 2, 3, 5]], kept[[1, 2, 3, 5]])
    assert kept[4] != 0
    view = make_batch(CUT)
    shape(view, made)
    assert judged.judge(made, report(view, made))["length/live/proved"] == 1.0


def test_the_loss_must_see_the_dropped_advantages() -> None:
    view, made = make_batch(CUT), penalty()
    shape(view, made)
    assert judged.judge(made, report(view, made))["offpolicy/live/length_penalty"] == 1.0
    with pytest.raises(LivenessError, match="missing or changed"):
        judged.judge(made, report(view, made, lambda data: data.update({"advantages": data["advantages"] + 1})))
    short = penalty()
    shape(make_batch(CUT[1:4]), short)
    assert "no answer has reached data.max_response_length yet" in str(short.unproved())


class Trainer:
    """What the hook reads of verl's trainer: texts go through one method."""

    def __init__(self, step: int, answers: list[tuple[str, str, float]]) -> None:
        self.global_steps, self.answers, self.logged = step, answers, 0
        self.tokenizer = lambda texts, add_special_tokens: {"input_ids": [text.split() for text in texts]}

    def _maybe_log_val_generations(self, inputs: Any, outputs: Any, scores: Any) -> None:
        self.logged += 1

    def validate(self) -> dict[str, float]:
        inputs, outputs, scores = (list(each) for each in zip(*self.answers, strict=True))
        self._maybe_log_val_generations(inputs=inputs, outputs=outputs, scores=scores)
        return {"val-core/x": 1.0}


def test_validations_fix_classes_at_a_step_and_follow_them_over_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"truncated": "keep", "classes": {"from_step": 10, "samples": 2}}
    made = penalty(**settings)

    def run(which: LengthPenalty, step: int, *answers: tuple[str, str, float]) -> dict[str, float]:
        trainer = Trainer(step, list(answers))
        found = which.validate(trainer, trainer.validate)
        assert trainer.logged == 1
        assert "_maybe_log_val_generations" not in vars(trainer)
        return found

    first = [("p", "a b", 1.0), ("p", "a b", 1.0), ("q", "a b c", 0.0), ("q", "a", 0.0)]
    assert run(made, 5, *first) == {"val-core/x": 1.0}
    fixed = run(made, 10, *first)
    assert (fixed["length/val/easy/prompts"], fixed["length/val/hard/tokens"]) == (1.0, 2.0)
    later = [("p", "a b c d", 1.0), ("p", "a b", 0.0), ("q", "a", 1.0), ("q", "a", 0.0)]
    expected = {"easy/pass_rate": 0.5, "easy/tokens": 3.0, "hard/pass_rate": 0.5, "hard/tokens": 1.0}
    state = json.loads(json.dumps(made.state(tmp_path)))
    again = penalty(**settings)
    again.restore(state, tmp_path)
    for which in (made, again):
        found = run(which, 20, *later)
        assert {name: found[f"length/val/{name}"] for name in expected} == expected


def test_a_trainer_without_the_method_is_said() -> None:
    made = penalty(classes={"from_step": 0})
    with pytest.raises(LivenessError, match="has no _maybe_log_val_generations"):
        made.validate(SimpleNamespace(global_steps=0), dict)
    made._step = 3
    made._dropped = True
    assert "no validation since step 0 had 64 answers" in str(made.unproved())


def write_data(path: Path, questions: list[str]) -> str:
    rows = [
        {"prompt": [{"role": "user", "content": each}], "reward_model": {"ground_truth": "x"}} for each in questions
    ]
    pandas.DataFrame(rows).to_parquet(path)
    return str(path)


def write_dump(path: Path, rights: dict[str, int], n: int = 4) -> str:
    tokenizer = build_tokenizer("Spell it.")
    lines = []
    for question, right in rights.items():
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        lines += [{"input": text, "output": "", "gts": "x", "score": float(at < right), "step": 1} for at in range(n)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def read(tmp_path: Path, files: str, **given: Any) -> EasierPrompts:
    data = {"train_files": [files], "cache_dir": str(tmp_path), "filter_overlong_prompts": False, LEAVE_OUT: given}
    return EasierPrompts([files], build_tokenizer("Spell it."), OmegaConf.create(data))


def test_prompts_below_the_limit_are_left_out_of_the_training_data_alone(tmp_path: Path) -> None:
    files = write_data(tmp_path / "train.parquet", ["alpha bravo", "charlie", "delta echo", "foxtrot"])
    dump = write_dump(tmp_path / "1.jsonl", {"alpha bravo": 4, "charlie": 1, "delta echo": 2})
    given = {"dump": dump, "below": 0.5, "correct_at_least": 1.0}
    data = read(tmp_path, files, **given)
    assert [row["prompt"][0]["content"] for row in data.dataframe] == ["alpha bravo", "delta echo", "foxtrot"]
    assert (data.total, data.known, data.left_out, len(data)) == (4, 3, 1, 3)
    data.resume_dataset_state()
    assert (len(data), data.left_out) == (3, 1)
    made = penalty(truncated="keep", leave_out={"dump": dump, "below": 0.5})
    loader = SimpleNamespace(dataset=data)
    assert made.load_prompts(loader) is loader
    assert made.unproved() is None
    with pytest.raises(LivenessError, match="reads a list with 4 prompts, of which none was left out"):
        made.load_prompts(SimpleNamespace(dataset=[1, 2, 3, 4]))
    config = OmegaConf.create({"train_files": [], LEAVE_OUT: given, "filter_overlong_prompts": False})
    assert len(EasierPrompts([files], build_tokenizer("Spell it."), config)) == 4
    with pytest.raises(LivenessError, match="none of the 1 prompts of"):
        read(tmp_path, write_data(tmp_path / "other.parquet", ["golf"]), **given)


def test_verl_makes_the_training_data_of_the_configured_class(tmp_path: Path) -> None:
    from verl.utils.dataset.rl_dataset import get_dataset_class

    made = penalty(truncated="keep", leave_out={"dump": str(tmp_path / "1.jsonl")})
    config = OmegaConf.create({"data": {"custom_cls": {"path": None, "name": None}}})
    (said,) = made.configure(config)
    assert "EasierPrompts" in said
    assert get_dataset_class(config.data) is EasierPrompts
    assert config.data[LEAVE_OUT].below == 0.3
