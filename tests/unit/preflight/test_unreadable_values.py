"""Values of a kind that checks and verl cannot compute with."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.preflight.checks.readable import find_unreadable_values
from tests.support.mended import with_overrides


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"data": {"train_batch_size": "many"}}, "data.train_batch_size"),
        ({"data": {"train_batch_size": 0}}, "data.train_batch_size"),
        ({"actor_rollout_ref": {"rollout": {"temperature": "abc"}}}, "actor_rollout_ref.rollout.temperature"),
    ],
)
def test_a_value_of_another_kind_is_named_and_mended(config: dict[str, Any], key: str) -> None:
    wrong = OmegaConf.create(config)
    (problem,) = find_unreadable_values(wrong)
    assert problem.key == key
    assert list(find_unreadable_values(with_overrides(wrong, problem.overrides))) == []


def test_no_estimator_is_proposed_for_null() -> None:
    (problem,) = find_unreadable_values(OmegaConf.create({"algorithm": {"adv_estimator": None}}))
    assert (problem.overrides, "grpo" in problem.fix) == ((), True)


def test_keys_that_are_not_there_are_not_asked_for() -> None:
    assert list(find_unreadable_values(OmegaConf.create({"data": {"train_batch_size": 256}}))) == []
