"""The extension with verl's own estimators: both places, unchanged advantages, the proof, options and start-up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from recipe.offpolicy.batch.declared_keys import Configured
from recipe.offpolicy.correction import Problem
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.batch_view import read_sessions
from recipe.offpolicy.extensions.length_penalty import length_penalty, penalties
from recipe.offpolicy.extensions.length_penalty.left_out import EasierPrompts
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.length_penalty.settings import LEAVE_OUT, LengthSettings, find_problems, read_length
from recipe.offpolicy.extensions.validation_answers import Answer, fix_classes
from recipe.offpolicy.fault_tolerance.state_schema import CheckpointError
from recipe.offpolicy.proof.verify import LivenessError
from scripts.quickstart.model import build_tokenizer
from tests.support import judged
from tests.support.shaped import Rows, estimate, make_batch, report, shape

ALL_RIGHT: Rows = [("a", tokens, 1.0) for tokens in (4, 5, 6, 7, 8, 9, 10, 11)]
MIXED: Rows = [("b", 2, 1.0), ("b", 4, 0.0), ("b", 6, 1.0), ("b", 8, 0.0)]


def penalty(kind: str = "none", *, estimator: str = "grpo", by_std: bool = True, **settings: Any) -> LengthPenalty:
    made = LengthPenalty("length_penalty", {"kind": kind} | settings)
    algorithm = {"adv_estimator": estimator, "norm_adv_by_std_in_grpo": by_std}
    made.begin(OmegaConf.create({"algorithm": algorithm, "data": {"max_response_length": 12}}))
    return made


def plain(rows: Rows, **how: Any) -> Tensor:
    return shape(make_batch(rows), **how)


def judge(made: LengthPenalty, view: Any) -> dict[str, float]:
    return judged.judge(made, report(view, made))


def test_after_it_a_mixed_group_is_rewards_less_penalties_over_the_rewards_spread() -> None:
    found = shape(make_batch(MIXED), penalty("uniform", coefficient=0.01))
    lowered = torch.tensor([0.98, -0.04, 0.94, -0.08]).double()
    spread = (1 / 3) ** 0.5 + 1e-6
    torch.testing.assert_close(found, (lowered - lowered.mean()) / spread, atol=1e-6, rtol=0)


def test_skipped_groups_are_verls_to_the_bit() -> None:
    for place in ("after", "before"):
        found = shape(make_batch([*ALL_RIGHT, *MIXED]), penalty("uniform", zero_variance="skip", place=place))
        assert torch.equal(found[:8], plain([*ALL_RIGHT, *MIXED])[:8])
        assert not torch.equal(found[8:], plain(MIXED))


@pytest.mark.parametrize("place", ["after", "before"])
def test_without_a_penalty_advantages_are_verls_to_the_bit(place: str) -> None:
    for made in (
        penalty("none"),
        penalty("anchor", place=place),
        penalty("group", place=place, warmup={"from_step": 1}),
    ):
        assert torch.equal(shape(make_batch([*ALL_RIGHT, *MIXED]), made), plain([*ALL_RIGHT, *MIXED]))


def test_the_anchor_acts_from_the_step_on_that_freezes_it() -> None:
    """8 correct answers of 4 to 11 tokens: A = 7.5, and P = 0.3 (T - 7.5) / 7.5 for those longer than A."""
    made = penalty("anchor", coefficient=0.3, anchor={"min_samples": 16, "pass_rate": 0.9})
    assert torch.equal(shape(make_batch(ALL_RIGHT), made), plain(ALL_RIGHT))
    found = shape(make_batch(ALL_RIGHT, step=2), made)
    lost = torch.tensor([0.0, 0, 0, 0, 0.5, 1.5, 2.5, 3.5]).double() * 0.3 / 7.5
    torch.testing.assert_close(found, lost.mean() - lost, atol=1e-6, rtol=0)
    metrics = made.metrics()
    assert (metrics["length/anchor/frozen"], metrics["length/anchor/new"]) == (1.0, 1.0)
    assert (metrics["length/anchor/mean"], metrics["length/anchor/over_share"]) == (7.5, 0.5)


def test_an_anchor_of_the_source_pools_prompts() -> None:
    rows: Rows = [("a", 4, 1.0), ("a", 4, 1.0), ("b", 8, 1.0), ("b", 8, 1.0)]
    made = penalty("anchor", anchor={"min_samples": 4, "per": "source"})
    shape(make_batch(rows, data_source=["math"] * 4), made)
    assert made.anchors.length_of("math") == 6.0


def test_reference_lengths_are_tokens_or_a_column() -> None:
    by_column = make_batch(MIXED, extra_info=[{"budget": 4}] * 4)
    found = shape(by_column, penalty("reference", reference="extra_info.budget", coefficient=0.5))
    assert torch.equal(found, shape(make_batch(MIXED), penalty("reference", reference=4, coefficient=0.5)))
    assert not torch.equal(found, plain(MIXED))
    gap = make_batch(MIXED, extra_info=[{"budget": 4}, {"budget": 4}, {}, None])
    with pytest.raises(ValueError, match=r"the extra_info of sequence 2 in step 1 is {}, and has no length"):
        shape(gap, penalty("reference", reference="extra_info.budget"))


def test_most_and_applies_to() -> None:
    capped = penalty("uniform", coefficient=1.0, most=0.5)
    assert float(shape(make_batch(ALL_RIGHT), capped).abs().max()) < 1e-7  # all at the cap, and alike
    found = penalties.measure(
        "l", penalty("uniform", applies_to="correct").length, capped.anchors, make_batch(MIXED), None
    )
    assert found.penalty.tolist() == pytest.approx([2e-4, 0.0, 6e-4, 0.0])


def test_tool_tokens_and_padding_are_no_length() -> None:
    view = make_batch(MIXED)
    view.batch.batch["attention_mask"][:, 2:] = 1  # tool tokens behind the answer
    view.batch.batch["responses"][view.batch.batch["response_mask"] == 0] = 49
    sessions = read_sessions(view, most_tokens=12)
    assert sessions.tokens.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert sessions.truncated.tolist() == [True] * 4
    assert torch.equal(shape(view, penalty("group")), shape(make_batch(MIXED), penalty("group")))


@pytest.mark.parametrize(
    ("place", "estimator", "by_std", "kind"),
    [("after", "grpo", True, "group"), ("before", "grpo", False, "uniform"), ("before", "rloo", True, "group")],
)
def test_it_is_proved(place: str, estimator: str, by_std: bool, kind: str) -> None:
    made = penalty(kind, place=place, estimator=estimator, by_std=by_std, coefficient=0.02)
    rows: Rows = [*ALL_RIGHT, *MIXED, ("alone", 5, 1.0), ("pair", 3, 0.0), ("pair", 4, 1.0)]
    view, without = make_batch(rows), plain(rows, name=estimator, by_std=by_std)
    moved = shape(view, made, name=estimator, by_std=by_std) - without
    found = judge(made, view)
    assert found["length/live/proved"] == 1.0
    assert found["length/live/changed_rows"] >= 12
    share = float(moved.abs().sum() / (moved.abs().sum() + without.abs().sum()))
    assert made.metrics()["length/penalty/share_of_advantage"] == pytest.approx(share, rel=1e-5)


def test_rows_that_do_not_change_although_they_must_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made, view = penalty("group"), make_batch(ALL_RIGHT)
    shape(view, made)
    made._changed = 0
    with pytest.raises(LivenessError, match=r"no sequence's advantages .* must change \(group a, rollout 0: 0 "):
        judge(made, view)


def test_an_estimator_that_does_not_see_the_lowered_rewards_is_found() -> None:
    made, view = penalty("group", place="before"), make_batch(ALL_RIGHT)
    raw = view.scores.clone()

    def blind() -> None:
        view.batch.batch["token_level_rewards"] = raw
        estimate(view)()

    with pytest.raises(LivenessError, match=r"group a, rollout 0, the advantage that grpo .* the lowered rewards is 0"):
        AddOns([made]).compute_advantages(view, blind)


def test_a_checkpoint_carries_the_anchors(tmp_path: Path) -> None:
    settings = {"anchor": {"min_samples": 8, "pass_rate": 0.9}, "coefficient": 0.3}
    first = penalty("anchor", **settings)
    shape(make_batch(ALL_RIGHT), first)
    state = json.loads(json.dumps(first.state(tmp_path / "length_penalty")))
    assert state == {"anchors": 1}
    again, anew = penalty("anchor", **settings), penalty("anchor", **settings)
    again.restore(state, tmp_path / "length_penalty")
    long: Rows = [("a", 9, 1.0), ("a", 12, 1.0)]
    assert torch.equal(shape(make_batch(long, step=2), again), shape(make_batch(long, step=2), first))
    assert not torch.equal(shape(make_batch(long, step=2), first), shape(make_batch(long, step=2), anew))
    (tmp_path / "length_penalty" / length_penalty.FILE).unlink()
    with pytest.raises(CheckpointError, match="records 1 anchors"):
        anew.restore(state, tmp_path / "length_penalty")


# Answers out of the loss, prompts out of the data, and classes that an early checkpoint fixes


CUT: Rows = [("a", 12, 0.0), ("a", 4, 1.0), ("a", 6, 1.0), ("a", 8, 0.0), ("b", 12, 1.0), ("b", 3, 1.0)]
"""Two answers of 12 tokens, the maximum."""
DROP: dict[str, Any] = {"truncated": "drop"}


def test_dropped_answers_have_no_advantage_and_stay_in_their_groups_statistics() -> None:
    """Rewards 0, 1, 1, 0: mean 1/2, standard deviation sqrt(1/3); the first row would have -sqrt(3)/2."""
    found = shape(make_batch(CUT), made := penalty(**DROP))
    each = 0.5 / ((1 / 3) ** 0.5 + 1e-6)
    assert found.tolist() == pytest.approx([0.0, each, each, -each, 0.0, 0.0])
    assert made.metrics()["length/dropped_sequences"] == 2.0
    kept = shape(make_batch(CUT), penalty())
    assert kept.tolist() == pytest.approx([-each, each, each, -each, 0.0, 0.0])


def test_answers_that_are_never_dropped_are_said() -> None:
    short = penalty(**DROP)
    shape(make_batch(CUT[1:4]), short)
    assert "no answer has reached data.max_response_length yet" in str(short.unproved())


class Trainer:
    """The part of verl's trainer that the hook reads: texts go through one method."""

    def __init__(self, step: int, answers: list[tuple[str, str, float]]) -> None:
        self.global_steps, self.answers, self.logged = step, answers, 0
        self.tokenizer = lambda texts, add_special_tokens: {"input_ids": [text.split() for text in texts]}

    def _maybe_log_val_generations(self, inputs: Any, outputs: Any, scores: Any) -> None:
        self.logged += 1

    def validate(self) -> dict[str, float]:
        inputs, outputs, scores = (list(each) for each in zip(*self.answers, strict=True))
        self._maybe_log_val_generations(inputs=inputs, outputs=outputs, scores=scores)
        return {"val-core/x": 1.0}


def test_classes_and_reference_lengths_at_their_bounds() -> None:
    shares = {"a": 10, "b": 9, "c": 1, "d": 0}
    answers = [Answer(prompt, 5, number < right) for prompt, right in shares.items() for number in range(10)]
    assert fix_classes(answers, samples=10) == {"a": "easy", "b": "other", "c": "other", "d": "hard"}
    assert [read_length({"budget": value}, "extra_info.budget") for value in (0, 1)] == [None, 1.0]


def test_validations_fix_classes_at_a_step_and_follow_them_over_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"classes": {"from_step": 10, "samples": 2}}
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
    made = penalty(classes={"from_step": 0}, **DROP)
    with pytest.raises(LivenessError, match="has no _maybe_log_val_generations"):
        made.validate(SimpleNamespace(global_steps=0), dict)
    made._step = 3
    made._dropped = True
    assert "no validation since step 0 had at least 64 answers" in str(made.unproved())


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


def read_prompts(tmp_path: Path, files: str, **given: Any) -> EasierPrompts:
    data = {"train_files": [files], "cache_dir": str(tmp_path), "filter_overlong_prompts": False, LEAVE_OUT: given}
    return EasierPrompts([files], build_tokenizer("Spell it."), OmegaConf.create(data))


def test_prompts_below_the_limit_are_left_out_of_the_training_data_alone(tmp_path: Path) -> None:
    files = write_data(tmp_path / "train.parquet", ["alpha bravo", "charlie", "delta echo", "foxtrot"])
    dump = write_dump(tmp_path / "1.jsonl", {"alpha bravo": 4, "charlie": 1, "delta echo": 2})
    given = {"dump": dump, "below": 0.5, "correct_at_least": 1.0}
    data = read_prompts(tmp_path, files, **given)
    assert [row["prompt"][0]["content"] for row in data.dataframe] == ["alpha bravo", "delta echo", "foxtrot"]
    assert (data.total, data.known, data.left_out, len(data)) == (4, 3, 1, 3)
    data.resume_dataset_state()
    assert (len(data), data.left_out) == (3, 1)
    made = penalty(leave_out={"dump": dump, "below": 0.5})
    loader = SimpleNamespace(dataset=data)
    assert made.load_prompts(loader) is loader
    assert made.unproved() is None
    with pytest.raises(LivenessError, match="reads a list with 4 prompts, and no prompt was left out"):
        made.load_prompts(SimpleNamespace(dataset=[1, 2, 3, 4]))
    config = OmegaConf.create({"train_files": [], LEAVE_OUT: given, "filter_overlong_prompts": False})
    assert len(EasierPrompts([files], build_tokenizer("Spell it."), config)) == 4
    with pytest.raises(LivenessError, match="none of the 1 prompts of"):
        read_prompts(tmp_path, write_data(tmp_path / "other.parquet", ["golf"]), **given)


def test_verl_makes_the_training_data_of_the_configured_class(tmp_path: Path) -> None:
    from verl.utils.dataset.rl_dataset import get_dataset_class

    made = penalty(leave_out={"dump": str(tmp_path / "1.jsonl")})
    config = OmegaConf.create({"data": {"custom_cls": {"path": None, "name": None}}})
    (said,) = made.configure(config)
    assert "EasierPrompts" in said
    assert get_dataset_class(config.data) is EasierPrompts
    assert config.data[LEAVE_OUT].below == 0.3


# Keys next to which a length penalty is ERROR or NO-OP, with the override that fixes it; and the shipped options


DEFAULTS = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 8,
    "trainer.total_epochs": 10,
    "trainer.total_training_steps": 100,
    "data.max_response_length": 1000,
}


def problems(settings: dict[str, Any], **changes: Any) -> list[Problem]:
    config = OmegaConf.create({})
    for key, value in (DEFAULTS | {name.replace("__", "."): value for name, value in changes.items()}).items():
        OmegaConf.update(config, key, value)
    length = LengthSettings.from_mapping("length_penalty", settings)
    return list(find_problems("length_penalty", length, Configured(config, "length_penalty")))


def test_the_row_without_a_reference_length_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pandas.DataFrame({"extra_info": [{"budget": 3.0}, {"budget": float("inf")}]}).to_parquet(path)
    settings = {"kind": "reference", "reference": "extra_info.budget"}
    (problem,) = problems(settings, data__train_files=str(path))
    assert f"row 1 of {path} has no length" in problem.reason
    assert "or set length_penalty=anchor" in problem.fix
    pandas.DataFrame({"extra_info": [{"budget": 3.0}]}).to_parquet(path)
    assert problems(settings, data__train_files=[str(path)]) == []


@pytest.mark.parametrize(("text", "said"), [(None, "no such file"), ("", "not a validation"), ("{}", "not a valid")])
def test_a_file_that_is_no_dump_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    dump = tmp_path / "100.jsonl"
    if text is not None:
        dump.write_text(text)
    (problem,) = problems({"kind": "none", "leave_out": {"dump": str(dump)}})
    assert (problem.key, problem.verdict) == ("length_penalty.leave_out.dump", "ERROR")
    assert said in problem.reason


def test_a_class_of_the_data_next_to_that_of_left_out_prompts_is_refused(tmp_path: Path) -> None:
    (dump := tmp_path / "1.jsonl").write_text('{"input": "q", "score": 1.0}')
    settings = {"kind": "none", "leave_out": {"dump": str(dump)}}
    assert problems(settings) == []
    own = {"data__custom_cls__path": "pkg://recipe.offpolicy.extensions.length_penalty.left_out"}
    assert problems(settings, **own) == []
    (found,) = problems(settings, data__custom_cls__path="mine.py")
    assert (found.verdict, found.key) == ("ERROR", "data.custom_cls.path")
