"""Rejection fine-tuning end to end: a served student, its correct answers, and the data set in verl's SFT trainer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from recipe.offpolicy.extensions.opd.rft import RftError, keep_right
from recipe.offpolicy.rft import main
from tests.support.byte_tokenizer import build_byte_tokenizer
from tests.support.fake_teacher import FakeTeacher, serving
from verl.utils import hf_tokenizer
from verl.utils.reward_score import default_compute_score

# Like Qwen3's: a message by itself loses its thinking, which only the last answer keeps.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and (loop.length == 1 or not loop.last) %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SUMS = [(1, 2), (4, 4), (30, 5)]
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "sums" and extra_info == {"index": 7}
    return {"score": float(solution_str.strip().endswith(ground_truth))}
"""


class Student(FakeTeacher):
    """A student that answers "A + B" wrongly, correctly, correctly in the same words, correctly in other words, and
    without an end.
    """

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/v1/completions":
            return super().answer(path, body)
        if self.failures:
            return self.failures.pop(0), {"error": "not now"}
        self.asked.append(body)
        alphabet = build_byte_tokenizer([])
        a, b = map(int, re.findall(r"\d+", alphabet.decode(body["prompt"])))
        right, other = f"{a} and {b}\nis {a + b}", f"it is {a + b}"
        texts = ["7 or so", right, f"{right}\n", other, f"{right} or"]
        ends = ["stop"] * 4 + ["length"]
        if (a, b) == (4, 4):
            texts[1:4] = ["5"] * 3
        return 200, {"choices": [{"text": t, "finish_reason": e} for t, e in zip(texts, ends, strict=True)]}


@pytest.fixture
def student() -> Iterator[Student]:
    with serving(Student()) as serves:
        assert isinstance(serves, Student)
        yield serves


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, template in (("student", None), ("teacher", THINKING)):
        tokenizer = build_byte_tokenizer([])
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a} + {b}"}],
            "data_source": "sums",
            "reward_model": {"ground_truth": str(a + b)},
            "extra_info": {"index": 7},
        }
        for a, b in SUMS
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "data.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def make(folder: Path, student: Student, *more: str) -> int:
    given = [str(folder / "data.parquet"), "--url", student.url, "--out", str(folder / "out"), "-n", "5"]
    given += ["--student", str(folder / "student"), "--teacher", str(folder / "teacher")]
    return main([*given, "--reward", f"{folder / 'reward.py'}:score", *more])


def test_right_answers_reach_verls_trainer(folder: Path, student: Student, capsys: pytest.CaptureFixture[str]) -> None:
    """2 of 3 prompts are solved, with 2 different answers each; the data set is that of the printed command."""
    from verl.trainer.sft_trainer import create_sft_dataset  # which takes seconds to import

    pattern = "<think>{response}</think>{last}"
    assert make(folder, student, "--format", pattern, "--temperature", "0.7", "--stop", "\n\n") == 0
    said = capsys.readouterr().out
    assert "3 prompts, 15 answers: 12 finished, 6 correct; 2 prompts solved; 4 different answers kept" in said
    assert (student.asked[0]["n"], student.asked[0]["temperature"], student.asked[0]["stop"]) == (5, 0.7, ["\n\n"])
    command = shlex.split(said[said.index("torchrun") :].replace("\\\n", ""))
    assert command[:5] == ["torchrun", "--standalone", "--nproc_per_node=1", "-m", "verl.trainer.sft_trainer"]
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer_engine", overrides=command[5:])
    tokenizer = hf_tokenizer(config.model.tokenizer_path)
    data = create_sft_dataset(config.data.train_files, config.data, tokenizer, None)
    trained, seen = [], []
    for row in range(len(data)):
        item = data[row]
        mask = item["loss_mask"].bool()
        assert torch.equal(item["position_ids"], torch.arange(len(mask)))
        assert len(mask) <= config.data.max_length
        seen.append(tokenizer.decode(item["input_ids"][~mask]))
        trained.append(tokenizer.decode(item["input_ids"][mask]))
    assert sorted(set(seen)) == ["<user>1 + 2</user>\n<assistant>", "<user>30 + 5</user>\n<assistant>"]
    assert sorted(trained) == sorted(
        f"<think>{text}</think>{last}</assistant>"
        for a, b in (SUMS[0], SUMS[2])
        for text, last in ((f"{a} and {b}\nis {a + b}", f"is {a + b}"), (f"it is {a + b}", f"it is {a + b}"))
    )
    config.data.max_length = 3
    with pytest.raises(ValueError, match=r"row 0 has \d+ tokens, but data.max_length=3"):
        create_sft_dataset(config.data.train_files, config.data, tokenizer, None)[0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--right-from", "2"], "no answer was correct"),
        (["--format", "{last}!"], "no correct answer is still correct in the format"),
        (["--reward", "nowhere.py:f"], "no such file"),
        (["--api-key", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE of opd.teacher.api_key is not set"),
        (["--teacher", "{student}"], "has no chat template"),
    ],
)
def test_what_is_wrong_ends_in_a_sentence(
    more: list[str], said: str, folder: Path, student: Student, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(folder, student, *(each.format(student=folder / "student", last="{last}") for each in more)) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "out" / "train.parquet").exists()


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda **_: None, "no score for an answer of the data source sums (TypeError"),
        (lambda **_: float("nan"), "ValueError: a score of nan"),
        (default_compute_score, "NotImplementedError: Reward function is not implemented for data_source='sums'"),
    ],
)
def test_an_answer_without_a_score_is_an_error(score: Any, said: str) -> None:
    row = {"data_source": "sums", "reward_model": {"ground_truth": "5"}}
    with pytest.raises(RftError, match=re.escape(said)):
        keep_right(["5"], row, score, right_from=1.0, most=9, pattern="{response}")
