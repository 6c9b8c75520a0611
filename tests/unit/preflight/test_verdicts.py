"""The verdict of each start-up check: overrides, the key that it names, and the override that fixes it."""

from __future__ import annotations

import importlib

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.preflight import checks
from recipe.offpolicy.preflight.composed import SHADOW, Composed, copy_config
from recipe.offpolicy.preflight.examination import (
    CHECKS,
    REMARKS,
    Check,
    path,
    rollout,
    run_keys,
    staleness,
)
from tests.support.examples import each_nth_by_default
from tests.support.short_keys import UNCHANGED, in_full, read_table
from verl_patches.execution_path import live_path

pytestmark = [pytest.mark.verl(">=0.9.1"), pytest.mark.usefixtures("each_actor_is_probed_once")]
RECORDED = "rollout.enable_rollout_routing_replay=true"
CAPPED = "level: %s, kind: truncate, lower: null, upper: 2.0"
NAMED = {
    "shadows by version": (
        f"offpolicy.shadow={{v: {{weight: {{{CAPPED % 'version'}}}}}, w: {{weight: {{{CAPPED % 'token'}}}}}}}"
    ),
    "a shadow by age": f"offpolicy.shadow={{old: {{weight: {{{CAPPED % 'token'}, by_staleness: [1.0, 1.5]}}}}}}",
    "uncorrected": "correction.weight=null; correction.masks={}",
    "legacy worker": "trainer.use_v1=false; trainer.use_legacy_worker_impl=auto",
    "V0": "trainer.use_v1=false",
    "asynchronous": "v1.trainer_mode=separate_async",
    "colocated": "v1.trainer_mode=colocate_async",
    "one gradient step": "data.train_batch_size=256",
    "KL loss": "actor.use_kl_loss=true",
    "bounded": "offpolicy.staleness.eta=2",
    "a mask on age": "masks.stale={aggregate: staleness, level: token, upper: 1}",
    "R3 on FSDP": f"model.path=none; actor.strategy=fsdp2; fsdp.router_replay.mode=R3; {RECORDED}",
    "R2 on FSDP": f"model.path=none; actor.strategy=fsdp2; fsdp.router_replay.mode=R2; {RECORDED}",
    "R2 on Megatron": "actor.strategy=megatron; megatron.router_replay.mode=R2",
    "R3 on Megatron": "actor.strategy=megatron; megatron.router_replay.mode=R3",
    "a support": "correction.support=engine; rollout.top_p=0.9; actor.strategy=fsdp2",
    "centred": "correction.centering=20; actor.strategy=fsdp2",
    "bypass's loss": "actor.policy_loss.loss_mode=bypass_mode",
    "five rollouts": "rollout.n=5",
    "what was run": "trainer.device=cuda; algorithm.adv_estimator=grpo",
    "a clip": "correction.kl_clip={lower: 0.8, upper: 1.2}",
    "a KL weight": "correction.kl_weight={ratio: full, upper: 2.0}",
    "recorded": "offpolicy.record.without_replay=true",
    "routes recorded": RECORDED,
    "by age": "weight.by_staleness=[1.0,1.5]",
    "interpolated by age": "correction.proximal=loglinear; correction.alpha=by_age",
    "interpolated": "correction.proximal=loglinear; correction.alpha=0.5",
    "KL in reward": "algorithm.use_kl_in_reward=true",
    "our bypass": "correction.proximal=bypass",
    "verl's bypass": "verl.bypass_mode=true",
    "token weight of verl's": "verl.rollout_is=token",
    "grpo": "algorithm.adv_estimator=grpo",
    "short answers": "data.max_response_length=256",
    "dynamic": "actor.use_dynamic_bsz=true; rollout.log_prob_use_dynamic_bsz=true",
    "no mu": "rollout.calculate_log_probs=false",
    "at 0.7": "rollout.temperature=0.7",
}


def find_check(name: str) -> Check:
    module, name = name.split(".")
    check: Check = getattr(importlib.import_module(f"{checks.__name__}.{module}"), name)
    return check


CASES = {(find_check(head.split()[0]), head.split()[1]): cases for head, cases in read_table("verdicts.txt")}
"""(check, release of verl) -> overrides, and the problems found: verdict, key and fix without the own key."""
LEFT = {"trainer.use_legacy_worker_impl=on"}
"""Problems for which the installed release accepts a different fix."""


def with_values(config: DictConfig, overrides: list[str]) -> DictConfig:
    """A copy with these overrides, whether or not the keys exist."""
    config = copy_config(config)
    OmegaConf.set_struct(config, False)
    for override in OverridesParser.create().parse_overrides(overrides):
        owner, _, name = override.key_or_group.rpartition(".")
        if override.is_delete():
            del (OmegaConf.select(config, owner) if owner else config)[name]
        else:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=False, force_add=True)
    return config


def compose(base: DictConfig, release: str, overrides: list[str]) -> Composed:
    run = Composed(with_values(base, overrides))
    run.path = live_path(run.config, release)
    return run


def list_overrides(words: str) -> list[str]:
    return [
        in_full(each) for word in words.split("; ") for each in NAMED.get(word, word).split("; ") if each != UNCHANGED
    ]


def read_expected(written: str) -> tuple[str, str, tuple[str, ...]]:
    head, _, fixes = written.partition(": ")
    verdict, key = head.split(" ", 1)
    key = in_full(key)
    written_out = (f"{key}{each}" if each.startswith("=") else in_full(each) for each in fixes.split("; ") if each)
    return verdict, key, tuple(written_out)


@pytest.mark.parametrize(("check", "release"), CASES, ids=[f"{check.__name__}-{release}" for check, release in CASES])
def test_the_verdicts_of_a_check(check: Check, release: str, base: DictConfig) -> None:
    for words, *expected in CASES[check, release]:
        found = list(check(compose(base, release, list_overrides(words))))
        assert [(each.verdict, each.key, each.overrides) for each in found] == list(map(read_expected, expected)), words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "release"),
    each_nth_by_default(4, CASES),
    ids=[f"{check.__name__}-{release}" for check, release in CASES],
)
def test_what_fixes_a_problem_leaves_none_of_its_key(check: Check, release: str, base: DictConfig) -> None:
    for words, *_ in CASES[check, release]:
        run = compose(base, release, list_overrides(words))
        for problem in check(run):
            assert problem.reason.endswith("."), words
            if problem.overrides and words not in LEFT and problem.key != SHADOW:  # which takes names in a launch
                fixed = compose(run.config, release, list(problem.overrides))
                assert [
                    each for each in check(fixed) if (each.key, each.verdict) == (problem.key, problem.verdict)
                ] == [], words


def test_every_check_of_a_launch_is_in_the_table() -> None:
    elsewhere = {path.check_seams, path.check_lora, run_keys.check_resume, run_keys.check_folders, rollout.check_bucket}
    elsewhere |= {
        rollout.check_model_runner,
        rollout.check_agent_loops,
        staleness.check_extensions,
        staleness.warn_extensions,
    }
    asked = {check for check, _ in CASES} - {run_keys.check_by_verl} | elsewhere
    assert asked == {*CHECKS, *REMARKS}
