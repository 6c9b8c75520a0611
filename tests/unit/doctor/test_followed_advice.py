"""A launch that stops says what would fix it, and does not stop for that any more once it is pasted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig, open_dict

from recipe.offpolicy.correction import Problem
from recipe.offpolicy.doctor.diagnosis import judge
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.preflight.python_source import OURS
from tests.support.applications import NEEDED, application, changed
from tests.support.doctor_cases import ACTOR, ROLLOUT, VERL, VERLS
from tests.support.mended import with_overrides

pytestmark = [pytest.mark.verl(">=0.9"), pytest.mark.slow]

Changes = dict[str, Any]
WORKERS = f"{ACTOR}.policy_loss.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
# data.train_batch_size is 1024 and ppo_mini_batch_size 256 in verl's own configuration: four gradient steps a batch.
ONE_STEP: Changes = {"data.train_batch_size": 256}
CLIP: Changes = {"correction.kl_clip": {"lower": 0.8, "upper": 1.2}, f"{ACTOR}.use_kl_loss": True}
LOGLINEAR: Changes = {"correction.proximal": "loglinear", "correction.alpha": 0.5}
ESTIMATOR = "algorithm.adv_estimator"
ENV = "ray_kwargs.ray_init.runtime_env"
SHADOW = "offpolicy.shadow"

# What is changed next to correction=[tis_token,gsm], and the key of the problem that it makes.
BY_NAME: dict[str, tuple[Changes, str]] = {
    "no number of batches": (
        {"offpolicy.staleness.eta": -1, "trainer.v1.trainer_mode": "colocate_async"},
        "offpolicy.staleness.eta",
    ),
    "a share of the policy that nothing reads": ({"correction.alpha": 0.5}, "correction.alpha"),
    "no share of the policy": ({"correction.proximal": "loglinear"}, "correction.alpha"),
    "a weight that counts twice": ({"correction.proximal": "bypass"}, "correction.weight.ratio"),
    "a mask on a ratio of 1": (
        {"correction.proximal": "reuse", "correction.masks.gsm.ratio": "ppo"} | ONE_STEP,
        "correction.masks.gsm.ratio",
    ),
    "a clip of a ratio of 1": ({"correction.proximal": "reuse"} | ONE_STEP | CLIP, "correction.kl_clip"),
    "a count before pi_old": (LOGLINEAR | {"correction.denominator": "kept"}, "correction.denominator"),
    "a count of all": ({"correction.masks": {}, "correction.denominator": "kept"}, "correction.denominator"),
    "pi_old in the estimator": (LOGLINEAR | {ESTIMATOR: "optimal_token_baseline"}, "correction.proximal"),
    "a clip of k1": (CLIP | {f"{ACTOR}.kl_loss_type": "k1"}, f"{ACTOR}.kl_loss_type"),
    "a batch below a mini-batch": ({"data.train_batch_size": 128}, f"{ACTOR}.ppo_mini_batch_size"),
    "a variable of another value": ({f"{ENV}.env_vars.VERL_PLATFORM": "cuda"}, f"{ENV}.env_vars.VERL_PLATFORM"),
    "a set-up that nothing reads": ({"setup.engine": "same"}, "setup.engine"),
    "a set-up of no keys": ({"setup": 5}, "setup"),
    "a set-up's key misspelt": ({"setup.modle": "moe"}, "setup.modle"),
    "a set-up's value misspelt": ({"setup.model": "densee"}, "setup.model"),
    "no mini-batches": ({"setup.minibatches": 0}, "setup.minibatches"),
    "shadows that are none": ({SHADOW: 5}, SHADOW),
    "a shadow of no name": ({SHADOW: [5]}, SHADOW),
    "a shadow that there is not": ({SHADOW: ["gms"]}, SHADOW),
    "a shadow twice": ({SHADOW: ["gsm", "gsm"]}, SHADOW),
    "several shadows in one word": ({SHADOW: ["gsm,opsm"]}, SHADOW),
    "a shadow with a pi_old of its own": ({SHADOW: ["bypass"]}, SHADOW),
    "a shadow of nothing": ({SHADOW: ["none"]}, SHADOW),
    "a delta of no shadow": ({"offpolicy.shadow_delta": 0.5}, "offpolicy.shadow_delta"),
    "a delta in words": ({SHADOW: ["opsm"], "offpolicy.shadow_delta": "low"}, "offpolicy.shadow_delta"),
    "a fallback of no name": (
        {"offpolicy.alarms.ess.action": "fallback", "offpolicy.alarms.ess.fallback": 5},
        "offpolicy.alarms.ess.fallback",
    ),
}

# The same of verl's own correction, launched by verl.
OF_VERL: dict[str, tuple[Changes, str]] = {
    "two bounds where there is one": (
        {f"{VERL}.rollout_rs": "seq_max_k2", f"{VERL}.rollout_rs_threshold": "0.5_2.0"},
        f"{VERL}.rollout_rs_threshold",
    ),
    "a worker that weighs otherwise": (
        {
            f"{VERL}.bypass_mode": True,
            f"{VERL}.rollout_is": "token",
            LOSS_MODE: "bypass_mode",
            WORKERS: {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "bypass_mode": True},
        },
        f"{VERL}.rollout_is",
    ),
    "the loss of bypass mode without it": ({LOSS_MODE: "bypass_mode"}, LOSS_MODE),
    "mu for the legacy actor": ({f"+{ACTOR}.use_rollout_log_probs": True}, f"{ACTOR}.use_rollout_log_probs"),
    "a mode that nothing reads": (
        {"trainer.use_v1": False, "trainer.v1.trainer_mode": "separate_async"},
        "trainer.v1.trainer_mode",
    ),
}


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    with application("correction=[tis_token,gsm]", f"{ROLLOUT}.name=vllm", *NEEDED) as config:
        yield config


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def told(module: str, config: DictConfig, key: str) -> list[Problem]:
    diagnosis = judge(changed(config, {}), Launch(module, ()))
    return [problem for problem in diagnosis.problems if problem.key == key]


def follow(module: str, config: DictConfig, key: str) -> None:
    problems = told(module, config, key)
    assert problems, judge(config, Launch(module, ())).problems
    for problem in problems:
        if not problem.overrides:  # either side of a conflict was asked for
            assert re.search(r"\bor\b|;", problem.fix), problem
            continue
        lost = [each for each in problem.overrides if each.startswith("~") or each.endswith(("=null", "=none"))]
        assert len(lost) < len(problem.overrides), f"{problem}: {problem.pasted} removes what was asked for"
        mended = with_overrides(config, problem.overrides)
        assert problem.reason not in [left.reason for left in told(module, mended, key)], problem


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_proposed_mends_a_launch_of_ours(name: str, base: DictConfig) -> None:
    changes, key = BY_NAME[name]
    follow(OURS, changed(base, changes), key)


@pytest.mark.parametrize("name", OF_VERL)
def test_what_is_proposed_mends_a_launch_of_verl(name: str, base: DictConfig) -> None:
    changes, key = OF_VERL[name]
    plain = changed(base, {name.lstrip("+"): value for name, value in changes.items()})
    with open_dict(plain):
        for section in ("correction", "offpolicy", "setup"):
            del plain[section]
    follow(VERLS, plain, key)


# What is changed next to correction=auto setup.model=dense.
CHOSEN: dict[str, tuple[Changes, str]] = {
    "a number that is contradicted": ({"setup.minibatches": 3}, "setup.minibatches"),
    "a limit of staleness that is too wide": (
        {"trainer.v1.trainer_mode": "colocate_async", "offpolicy.staleness.eta": 20},
        "offpolicy.staleness.eta",
    ),
    "stale rows without a limit": (
        {"trainer.v1.trainer_mode": "colocate_async", "trainer.v1.sampler.max_off_policy_threshold": 20},
        "trainer.v1.sampler.max_off_policy_threshold",
    ),
}


@pytest.fixture(scope="module")
def chosen() -> Iterator[DictConfig]:
    with application("correction=auto", "setup.model=dense", f"{ROLLOUT}.name=vllm", *NEEDED) as config:
        yield config


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_proposed_mends_a_launch_that_chooses(name: str, chosen: DictConfig) -> None:
    changes, key = CHOSEN[name]
    follow(OURS, changed(chosen, changes), key)
