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
from recipe.offpolicy.extensions.add_on import load_extensions
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.length_penalty.settings import LengthSettings, find_problems
from tests.support.applications import NEEDED, application

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


KL, FILTER = {"algorithm__use_kl_in_reward": True}, {"algorithm__filter_groups__enable": True}


@pytest.mark.parametrize(
    "rows",
    [
        {"extra_info": [{"budget": 3.0}, {"budget": None}]},
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


@pytest.mark.parametrize("column", [{"prompt": ["q"]}, {"extra_info": ["text"]}])
def test_a_data_set_without_the_column_has_no_reference_length(column: dict[str, Any], tmp_path: Path) -> None:
    pandas.DataFrame(column).to_parquet(path := tmp_path / "train.parquet")
    settings = {"kind": "reference", "reference": "extra_info.budget"}
    (problem,) = problems(settings, data__train_files=str(path))
    assert f"row 0 of {path} has no length" in problem.reason
    path.write_text("not Parquet")  # verl's loader says so
    assert problems(settings, data__train_files=str(path)) == []


@pytest.mark.parametrize("option", ["anchor", "uniform", "group", "none"])
def test_each_option_is_shipped(option: str) -> None:
    with application(f"length_penalty={option}", *NEEDED) as config:
        (extension,) = load_extensions(config)
    assert isinstance(extension, LengthPenalty)
    assert extension.length == LengthSettings.from_mapping("length_penalty", {"kind": option})
    assert (extension.worker() is None) == (option == "none")
    assert option in extension.meaning


def test_a_reference_is_to_be_given() -> None:
    with application("length_penalty=reference", "length_penalty.reference=300", *NEEDED) as config:
        (extension,) = load_extensions(config)
    assert isinstance(extension, LengthPenalty)
    assert extension.length.reference == 300
    assert "reference 300" in extension.meaning


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


@pytest.mark.parametrize("kind", ["none", "uniform", "group", "anchor"])
def test_the_set_up_of_the_length_study(kind: str) -> None:
    """R - a T with a = 1e-4, b = 0.1 and g = 0.01, no cap; 32 x 8 rollouts, clip 0.2, no KL, 16 384 tokens."""
    with application("+mode=length_dynamics", f"length_penalty={kind}", "correction=tis_token") as config:
        found = LengthSettings.from_mapping("length_penalty", OmegaConf.to_container(config.length_penalty))
        assert [each.verdict for each in find_problems("length_penalty", found, Configured(config))] == (
            ["NOTE"] if kind == "uniform" else []
        )
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (found.kind, found.place, found.most, found.classes.from_step) == (kind, "before", None, 100)
    assert found.coefficient == {"none": 0.0, "uniform": 1e-4, "group": 0.1, "anchor": 0.01}[kind]
    assert (config.data.train_batch_size, rollout.n, config.data.max_response_length) == (32, 8, 16384)
    assert (rollout.temperature, rollout.top_p, rollout.val_kwargs.n, rollout.val_kwargs.temperature) == (1, 1, 64, 1)
    assert (actor.optim.lr, actor.clip_ratio, actor.use_kl_loss, actor.loss_agg_mode) == (
        1e-6,
        0.2,
        False,
        "token-mean",
    )
    assert (actor.clip_ratio_low, actor.clip_ratio_high, config.algorithm.use_kl_in_reward) == (0.2, 0.2, False)
