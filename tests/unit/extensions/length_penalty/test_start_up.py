"""Keys next to which a length penalty is ERROR or NO-OP, with the override that fixes it; and the shipped options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.batch.declared_keys import Configured
from recipe.offpolicy.correction import Problem
from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.extensions.length_penalty.settings import LengthSettings, find_problems

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
    return list(
        find_problems(
            "length_penalty",
            LengthSettings.from_mapping("length_penalty", settings),
            Configured(config, "length_penalty"),
        )
    )


@pytest.mark.parametrize(
    "rows",
    [
        {"extra_info": [{"budget": 3.0}, {"budget": float("inf")}]},
        {"extra_info": [{"budget": "3"}, {"budget": "long"}]},
        {"extra_info": [{"budget": 3.0}, None]},
    ],
)
def test_the_row_without_a_reference_length_is_named(rows: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pandas.DataFrame(rows).to_parquet(path)
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


def test_no_prompt_is_easy_and_hard() -> None:
    settings = {"kind": "none", "classes": {"from_step": 10, "easy_above": 0.05}}
    with pytest.raises(CheckError, match=r"easy_above=0\.05: a prompt could be both easy and hard") as caught:
        LengthSettings.from_mapping("length_penalty", settings)
    assert caught.value.problems[0].overrides == ("length_penalty.classes.hard_below=0.05",)


def test_a_class_of_the_data_next_to_that_of_left_out_prompts_is_refused(tmp_path: Path) -> None:
    (dump := tmp_path / "1.jsonl").write_text('{"input": "q", "score": 1.0}')
    settings = {"kind": "none", "leave_out": {"dump": str(dump)}}
    assert problems(settings) == []
    own = {"data__custom_cls__path": "pkg://recipe.offpolicy.extensions.length_penalty.left_out"}
    assert problems(settings, **own) == []
    (found,) = problems(settings, data__custom_cls__path="mine.py")
    assert (found.verdict, found.key) == ("ERROR", "data.custom_cls.path")
