"""k that groups have no value for, keys next to which pass@k is ERROR or NO-OP, and the shipped options."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.batch.configured import Configured
from recipe.offpolicy.correction import Problem
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from recipe.offpolicy.extensions.pass_at_k.settings import PassAtKSettings, find_problems
from recipe.offpolicy.extensions.registry import load_extensions
from tests.support.applications import NEEDED, application

DEFAULTS = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.val_kwargs.n": 16,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
}
N, VALIDATION = "actor_rollout_ref__rollout__n", "actor_rollout_ref__rollout__val_kwargs__"


def problems(settings: dict[str, Any], **changes: Any) -> list[Problem]:
    config = OmegaConf.create({})
    for key, value in (DEFAULTS | {name.replace("__", "."): value for name, value in changes.items()}).items():
        OmegaConf.update(config, key, value)
    whole = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo"} | settings)
    return list(find_problems("pass_at_k", whole, Configured(config, "pass_at_k")))


GROUP_SIZE = {"mode": "group_size", "least": 5}
UPSAMPLE = {"mode": "upsample"}
FILTER = {"algorithm__filter_groups__enable": True}
DAPO = {"reward__reward_manager__name": "dapo", "reward__reward_kwargs__overlong_buffer_cfg__enable": True}
OPSM = {"correction__masks": {"opsm": {"when": "negative"}}}


@pytest.mark.parametrize(
    ("settings", "changes", "verdict", "override"),
    [
        ({"k": 8}, {}, "ERROR", "pass_at_k.k=7"),
        ({"objective": "analytic", "k": 8}, {}, "ERROR", "pass_at_k.k=7"),
        ({"objective": "groups", "k": 8}, {}, "ERROR", "pass_at_k.k=4"),
        ({"objective": "groups", "k": 3}, {}, "ERROR", "pass_at_k.k=4"),
        ({"objective": "loo_minus_one", "k": 9}, {}, "ERROR", "pass_at_k.k=7"),
        ({"schedule": [[0, 4], [9, 12], [20, 1]]}, {}, "ERROR", "pass_at_k.schedule=[[0, 4], [9, 7], [20, 1]]"),
        ({"k": 2}, {N: 2}, "ERROR", "actor_rollout_ref.rollout.n=4"),
        ({}, {"algorithm__adv_estimator": "gae"}, "ERROR", "algorithm.adv_estimator=grpo"),
        ({}, {"algorithm__adv_estimator": "grpo_passk"}, "ERROR", "algorithm.adv_estimator=grpo"),
        ({}, {"algorithm__use_kl_in_reward": True}, "ERROR", "algorithm.use_kl_in_reward=false"),
        ({}, DAPO, "ERROR", "reward.reward_kwargs.overlong_buffer_cfg.enable=false"),
        ({"k": 1}, {}, "NO-OP", "pass_at_k=null"),
        ({"objective": "loo_minus_one"}, OPSM, "NO-OP", "pass_at_k.objective=loo"),
        ({"budget": GROUP_SIZE}, {"trainer__use_v1": False}, "ERROR", "pass_at_k.budget.mode=none"),
        (
            {"budget": GROUP_SIZE},
            {"trainer__v1__trainer_mode": "colocate_async"},
            "ERROR",
            "pass_at_k.budget.mode=none",
        ),
        ({"budget": GROUP_SIZE | {"most": 7}}, {}, "ERROR", "pass_at_k.budget.most=8"),
        ({"budget": GROUP_SIZE | {"least": 9}}, {}, "ERROR", "pass_at_k.budget.least=8"),
        ({"budget": GROUP_SIZE}, FILTER, "ERROR", "algorithm.filter_groups.enable=false"),
        ({"budget": UPSAMPLE}, {"trainer__use_v1": False}, None, ""),
        ({"budget": UPSAMPLE}, FILTER, "ERROR", "algorithm.filter_groups.enable=false"),
        ({"budget": UPSAMPLE}, {"data__dataloader_num_workers": 8}, "ERROR", "data.dataloader_num_workers=0"),
        ({"budget": UPSAMPLE}, {"data__sampler__class_path": "a.py"}, "ERROR", "data.sampler.class_path=null"),
        ({"budget": UPSAMPLE}, {"data__shuffle": False}, "ERROR", "data.shuffle=true"),
        ({"objective": "none", "budget": UPSAMPLE}, {N: 1}, "ERROR", "actor_rollout_ref.rollout.n=8"),
        ({"objective": "none"}, {f"{VALIDATION}n": 8}, None, ""),
        (
            {"objective": "none", "metric": {"extrapolate": []}},
            {f"{VALIDATION}n": 8},
            "NO-OP",
            "actor_rollout_ref.rollout.val_kwargs.n=16",
        ),
        (
            {"objective": "none"},
            {f"{VALIDATION}temperature": 0},
            "NO-OP",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        ),
    ],
)
def test_what_it_cannot_stand_beside(
    settings: dict[str, Any], changes: dict[str, Any], verdict: str | None, override: str
) -> None:
    found = problems(settings, **changes)
    assert [problem.verdict for problem in found] == ([verdict] if verdict else [])
    assert all(override in f"{problem.overrides} {problem.advice}" for problem in found)


def test_one_greedy_sample_is_mended_by_both_keys() -> None:
    (problem,) = problems({"objective": "none"}, **{f"{VALIDATION}temperature": 0, f"{VALIDATION}n": 1})
    assert problem.overrides == (
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.n=16",
    )


def test_groups_that_may_be_too_small_for_k_are_noted() -> None:
    (problem,) = problems({"budget": {"mode": "group_size", "least": 2}})
    assert (problem.verdict, problem.key) == ("NOTE", "pass_at_k.budget.least")


@pytest.mark.parametrize("option", ["loo", "loo_minus_one", "analytic", "groups", "validation"])
def test_each_option_is_shipped(option: str) -> None:
    with application(f"pass_at_k={option}", *NEEDED) as config:
        (extension,) = load_extensions(config)
    assert isinstance(extension, PassAtK)
    objective = "none" if option == "validation" else option
    assert extension.pass_at_k == PassAtKSettings.from_mapping("pass_at_k", {"objective": objective})
    assert (extension.worker() is None) == (option == "validation")
    assert option in extension.meaning
