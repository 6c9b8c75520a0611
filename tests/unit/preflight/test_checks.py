"""Start-up checks: each stops what would leave the correction dead, wrong or double, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.preflight.checks import (
    REMARKS,
    find_missing_actor,
    find_null_sections,
    find_unresolved_interpolations,
    read_spec,
)
from recipe.offpolicy.preflight.examination import collect_problems, run_checks
from recipe.offpolicy.preflight.verl_keys.keys import find_changed_keys
from tests.support.applications import NEEDED, application, changed
from tests.support.corrections import GSM, TIS
from tests.support.examples import each_nth_when_quick

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
ACTOR = "actor_rollout_ref.actor"
VERL = "algorithm.rollout_correction"
NONE: dict[str, Any] = {"correction.weight": None, "correction.masks": {}}

pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    """verl's own defaults with ``correction=[tis_token,gsm]``: all checks pass."""
    with application("correction=[tis_token,gsm]", *NEEDED) as config:
        yield config


def problems(config: DictConfig, changes: dict[str, Any]) -> list[str]:
    """The problems of a configuration, as the user reads them."""
    try:
        run_checks(changed(config, changes))
    except CheckError as error:
        return str(error).split("\n")
    return []


def test_the_defaults_pass(base: DictConfig) -> None:
    assert run_checks(base).to_mapping() == {
        "weight": TIS | {"aggregate": "product", "ratio": "rollout", "normalize": False},
        "masks": {"gsm": GSM | {"sign": "row"}},
        "proximal": "recompute",
        "alpha": None,
        "denominator": "original",
        "baseline": "include",
        "kl_clip": None,
        "skyrl_compat": False,
        "allow_truncated_sampling": False,
    }


# Changes that must stop: what is changed, and what the message must say (key, value and fix).
STOPPED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "trainer mode": (
        {"trainer.v1.trainer_mode": "one_step_off"},
        ("trainer.v1.trainer_mode=one_step_off", "sync, colocate_async, separate_async"),
    ),
    "snapshots of offloaded weights": (
        {
            "trainer.v1.trainer_mode": "separate_async",
            "trainer.device": "cuda",
            f"{ACTOR}.strategy": "fsdp2",
            f"{ACTOR}.fsdp_config.param_offload": True,
        },
        (f"{ACTOR}.fsdp_config.param_offload=true", "trainer.v1.separate_async.parameter_sync_step=1"),
    ),
    "another engine": (
        {f"{ACTOR}.strategy": "veomni"},
        (f"{ACTOR}.strategy=veomni", "another engine than FSDP and Megatron", "No override corrects veomni"),
    ),
    "unknown key": ({"offpolicy.recrod": True}, ("offpolicy.recrod=true", "Did you mean offpolicy.record?")),
    "emptied": (
        {"offpolicy": None},
        ("offpolicy=null", "Remove this override"),
    ),
    "consent": (
        {"offpolicy.allow_identical_log_probs": "yes"},
        ("offpolicy.allow_identical_log_probs=yes", "Set true or false"),
    ),
    "no mu": (
        {f"{ROLLOUT}.calculate_log_probs": False},
        (f"{ROLLOUT}.calculate_log_probs=false", "Set it to true"),
    ),
    "raw mu": (
        {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        (f"{ROLLOUT}.logprobs_mode=raw_logprobs", "Set processed_logprobs"),
    ),
    "raw mu by the engine": (
        {f"{ENGINE}.logprobs_mode": "raw_logprobs"},
        (f"{ENGINE}.logprobs_mode=raw_logprobs", "Set processed_logprobs"),
    ),
    "raw mu by the engine, as vLLM spells it": (
        {f"{ENGINE}.logprobs-mode": "raw_logprobs"},
        (f"{ENGINE}.logprobs-mode=raw_logprobs", "Set processed_logprobs"),
    ),
    "greedy": ({f"{ROLLOUT}.do_sample": False}, (f"{ROLLOUT}.do_sample=true", "temperature > 0")),
    "temperature 0": ({f"{ROLLOUT}.temperature": 0}, (f"{ROLLOUT}.temperature=0", "temperature > 0")),
    "top-p": ({f"{ROLLOUT}.top_p": 0.9}, (f"{ROLLOUT}.top_p=0.9", f"Set {ROLLOUT}.top_p=1")),
    "top-k": ({f"{ROLLOUT}.top_k": 50}, (f"{ROLLOUT}.top_k=50", f"Set {ROLLOUT}.top_k=-1")),
    "min-p": ({f"{ROLLOUT}.min_p": 0.05}, (f"{ROLLOUT}.min_p=0.05", f"Set {ROLLOUT}.min_p=0")),
    "repetition penalty": (
        {f"{ROLLOUT}.repetition_penalty": 1.1},
        (f"{ROLLOUT}.repetition_penalty=1.1", f"Set {ROLLOUT}.repetition_penalty=1"),
    ),
    "top-p by the engine": (
        {f"{ENGINE}.override_generation_config.top_p": 0.9},
        (f"{ENGINE}.override_generation_config.top_p=0.9", "Set "),
    ),
    "verl's weights": (
        {f"{VERL}.rollout_is": "token"},
        (f"{VERL}.rollout_is=token", "does this already", "rollout_is=null"),
    ),
    "verl's rejection": (
        {f"{VERL}.rollout_rs": "seq_mean_k1", f"{VERL}.rollout_rs_threshold": "0.99_1.01"},
        (f"{VERL}.rollout_rs=seq_mean_k1", f"{VERL}.rollout_rs_threshold=0.99_1.01", "correct twice"),
    ),
    "verl's cap": (
        {f"{VERL}.rollout_is_threshold": 3.0},
        (f"{VERL}.rollout_is_threshold=3.0", "which is off", "Set correction.weight.upper=3.0 instead"),
    ),
    "verl's bypass": ({f"{VERL}.bypass_mode": True}, (f"{VERL}.bypass_mode=true", "Choose: ", "bypass_mode=false")),
    "a key that verl adds": ({f"{VERL}.new": 1}, (f"{VERL}.new=1", "Choose: ")),
    "a ratio that is 1 at the only gradient step": (
        {"correction.masks.gsm.ratio": "ppo", "data.train_batch_size": 256},
        ("correction.masks.gsm.ratio=ppo", "one gradient step", "below data.train_batch_size"),
    ),
    "KL's clip of a ratio that is 1": (
        {
            "correction.kl_clip": {"lower": 0.8, "upper": 1.2},
            f"{ACTOR}.use_kl_loss": True,
            "data.train_batch_size": 256,
        },
        ("correction.kl_clip=", "one gradient step"),
    ),
    "pi_old that nothing reads": (
        {**NONE, "correction.proximal": "bypass", f"{ACTOR}.policy_loss.loss_mode": "gpg"},
        ("correction.proximal=bypass", "loss_mode gpg has no ratio", "loss_mode=vanilla"),
    ),
    "an order of nothing": (
        {**NONE, "correction.skyrl_compat": True},
        ("correction.skyrl_compat=true", "or set correction.skyrl_compat=false"),
    ),
    "k1 that leaves out 0": (
        {"correction.masks.gsm": GSM | {"aggregate": "k1_mean", "lower": 0.1, "upper": 0.2}},
        ("correction.masks.gsm.lower=0.1", "leave out 0", "Set correction.masks.gsm.lower <= 0"),
    ),
    "two ratios to the current policy": (
        {"correction.weight.ratio": "full"},
        ("correction.weight.ratio=full", "loss_mode vanilla", "loss_mode=gpg"),
    ),
    "reuse with two gradient steps": (
        {"correction.proximal": "reuse", f"{ACTOR}.ppo_epochs": 2, "data.train_batch_size": 256},
        ("correction.proximal=reuse", "a batch gets 2", "ppo_epochs=1"),
    ),
    "reuse with mini-batches": (
        {"correction.proximal": "reuse", "data.train_batch_size": 1024},
        ("correction.proximal=reuse", "a batch gets 4", "ppo_mini_batch_size=data.train_batch_size"),
    ),
    "one engine, and rows of older weights": (
        {**NONE, "correction.proximal": "same_engine", "trainer.v1.trainer_mode": "colocate_async"},
        ("correction.proximal=same_engine", "trainer.v1.trainer_mode=colocate_async samples rows by older weights"),
    ),
    "one engine, and weights that are handed over now and then": (
        {**NONE, "correction.proximal": "same_engine", "trainer.v1.sync.parameter_sync_step": 2},
        ("correction.proximal=same_engine", "trainer.v1.sync.parameter_sync_step=2", "Set correction.proximal=recomp"),
    ),
    "interpolation that the reward's KL would read": (
        {"correction.proximal": "loglinear", "correction.alpha": 0.5, "algorithm.use_kl_in_reward": True},
        ("correction.proximal=loglinear", "algorithm.use_kl_in_reward=false"),
    ),
    "interpolation that the estimator would read": (
        {
            "correction.proximal": "loglinear",
            "correction.alpha": 0.5,
            "algorithm.adv_estimator": "optimal_token_baseline",
        },
        ("correction.proximal=loglinear", "optimal_token_baseline", "Set another estimator"),
    ),
    "a clip without a KL loss": (
        {"correction.kl_clip": {"lower": 0.8, "upper": 1.2}},
        ("correction.kl_clip=", "use_kl_loss=true"),
    ),
    "a clip of k1": (
        {
            "correction.kl_clip": {"lower": 0.8, "upper": 1.2},
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_type": "kl",
        },
        (f"{ACTOR}.kl_loss_type=kl", "Set kl_loss_type=k3+ or k2"),
    ),
    "kept of no count": (
        {"correction.denominator": "kept", f"{ACTOR}.loss_agg_mode": "token-sum"},
        (f"{ACTOR}.loss_agg_mode=token-sum", "token-mean"),
    ),
    "kept with shuffled rows": (
        {"correction.denominator": "kept", f"{ACTOR}.shuffle": True},
        (f"{ACTOR}.shuffle=true", "Set it to false"),
    ),
    "no group to take siblings from": (
        {"correction.baseline": "exclude", "algorithm.adv_estimator": "gae"},
        ("algorithm.adv_estimator=gae", "grpo, grpo_vectorized, rloo"),
    ),
    "distillation": (
        {"distillation.enabled": True},
        ("distillation.enabled=true", "distillation_ppo_loss", "No override keeps both"),
    ),
    "geo_mean": (
        {f"{ACTOR}.policy_loss.loss_mode": "geo_mean"},
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "No override corrects geo_mean", "vanilla"),
    ),
    "a loss that verl does not know": (
        {f"{ACTOR}.policy_loss.loss_mode": "vanila"},
        (f"{ACTOR}.policy_loss.loss_mode=vanila", "Unsupported loss mode"),
    ),
    "an actor that verl does not take": (
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": None},
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=null: verl does not take it", f"Set {ACTOR}.ppo_micro_batch_size_per_"),
    ),
    "two sizes of one thing": (
        {f"{ACTOR}.ppo_micro_batch_size": 2},
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1: ", f"Set {ACTOR}.ppo_micro_batch_size=null"),
    ),
    "an aggregation that verl does not know": (
        {f"{ACTOR}.loss_agg_mode": "mean"},
        (f"{ACTOR}.loss_agg_mode=mean: verl does not take it", f"Set {ACTOR}.loss_agg_mode=token-mean"),
    ),
    "a key that verl's actor does not have": (
        {f"{ACTOR}.policy_loss.no_such": 1},
        (
            f"{ACTOR}.policy_loss.no_such=1: verl has no such key there",
            f"What {ACTOR}.policy_loss.no_such asks for would not be done.",
        ),
    ),
    "sums without a scale": (
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"Set {ACTOR}.loss_scale_factor"),
    ),
}


@pytest.mark.parametrize("name", each_nth_when_quick(3, STOPPED))
def test_what_stops(name: str, base: DictConfig) -> None:
    changes, parts = STOPPED[name]
    found = problems(base, changes)
    assert found, "nothing stopped it"
    for part in parts:
        assert part in "\n".join(found)
    # Nothing but what was changed is complained about: one problem a key, at most.
    assert len(found) <= len(changes)


PASSED: dict[str, dict[str, Any]] = {
    "asynchronous": {"trainer.v1.trainer_mode": "colocate_async"},
    "the V0 trainer": {"trainer.use_v1": False},
    "identical log-probs are meant": {"offpolicy.allow_identical_log_probs": True},
    "neutral sampling": {f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.top_k": -1, f"{ENGINE}.min_p": 0.0},
    "vLLM's other way to say no top-k": {f"{ROLLOUT}.top_k": 0},
    "validation samples as it likes": {f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ROLLOUT}.val_kwargs.top_k": 20},
    "a temperature that both see": {f"{ROLLOUT}.temperature": 0.7},
    "other engine arguments": {f"{ENGINE}.max_logprobs": 5},
    "truncated sampling is meant": {
        "correction.allow_truncated_sampling": True,
        f"{ROLLOUT}.top_p": 0.9,
        f"{ROLLOUT}.top_k": 50,
        f"{ENGINE}.override_generation_config.repetition_penalty": 1.1,
    },
    "verl's correction is off": {VERL: None},
    "verl's correction is off key by key": {f"{VERL}.rollout_is": None, f"{VERL}.rollout_is_threshold": None},
    "another loss": {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    "sums with a scale": {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 64},
    "KL as a loss": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "low_var_kl"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSED)
def test_what_passes(name: str, base: DictConfig) -> None:
    assert problems(base, PASSED[name]) == []


@pytest.mark.parametrize(
    "name", ["no mu", "raw mu", "greedy", "top-p", "repetition penalty", "verl's weights", "geo_mean"]
)
def test_without_a_correction_the_rest_is_the_users(name: str, base: DictConfig) -> None:
    assert problems(base, STOPPED[name][0] | NONE) == []


@pytest.mark.parametrize("name", ["trainer mode", "unknown key", "distillation"])
def test_what_stops_also_without_a_correction(name: str, base: DictConfig) -> None:
    """These are about our loss being in the worker, which it is to measure the mismatch."""
    assert problems(base, STOPPED[name][0] | NONE)


def test_consent_is_to_truncation_only(base: DictConfig) -> None:
    consent = {"correction.allow_truncated_sampling": True}
    for name in ("no mu", "raw mu", "greedy", "verl's weights", "geo_mean"):
        assert problems(base, STOPPED[name][0] | consent), name


def test_all_problems_at_once(base: DictConfig) -> None:
    """One start tells everything, a line each."""
    changes = STOPPED["no mu"][0] | STOPPED["top-p"][0] | STOPPED["top-k"][0] | STOPPED["distillation"][0]
    found = problems(base, changes)
    assert len(found) == 4
    for key, value in changes.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        assert any(line.startswith(f"{key}={shown}: ") for line in found)


def test_what_verl_refuses_hides_no_problem_of_ours(base: DictConfig) -> None:
    """A launch that leaves out what verl demands is told of both."""
    found = problems(base, STOPPED["an actor that verl does not take"][0] | STOPPED["top-p"][0])
    assert len(found) == 2
    assert found[0].startswith(f"{ROLLOUT}.top_p=0.9: ")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"correction.x": 1}, "correction.x=1: unknown key"),
        ({"correction.weight.uper": 3.0}, "correction.weight.uper=3.0: unknown key"),
        ({"correction.masks.gsm.lower": 2.0}, "correction.masks.gsm.lower=2.0 with correction.masks.gsm.upper=1.01"),
        ({"correction.masks.gsm.lower": float("nan")}, "correction.masks.gsm.lower=nan"),
        ({"correction.masks.gsm.lower": "0.99_1.01"}, "correction.masks.gsm.lower=0.99_1.01"),
        ({"correction": None}, "Set correction=none"),
        ({"correction.weight": 2.0}, "correction.weight=2.0"),
    ],
)
def test_a_malformed_correction_stops_before_the_checks(changes: dict[str, Any], part: str, base: DictConfig) -> None:
    with pytest.raises(SpecError) as caught:
        run_checks(changed(base, changes))
    assert part in str(caught.value)


def test_interpolations_are_resolved(base: DictConfig) -> None:
    weight = read_spec(changed(base, {"cap": 3.0, "correction.weight.upper": "${cap}"})).weight
    assert weight is not None
    assert weight.upper == 3.0


def test_a_configuration_without_the_group(base: DictConfig) -> None:
    """As verl's own entry point would compose it."""
    config = changed(base, {})
    with open_dict(config):
        del config["correction"]
    with pytest.raises(SpecError, match="Set correction=none"):
        read_spec(config)


def test_a_section_of_nothing_is_named() -> None:
    """Once, and not by each section below."""
    config = OmegaConf.create({"trainer": {}, "data": None, "actor_rollout_ref": {"actor": "${x.y}", "rollout": {}}})
    found = {problem.key: problem.value for problem in find_null_sections(config)}
    assert found == {"actor_rollout_ref.actor": "${x.y}", "data": None}


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"trainer": {}}, True),  # verl's SFT
        ({"actor_rollout_ref": {"rollout": {}}}, True),  # verl's generation
        ({"actor_rollout_ref": {"actor": None}}, False),  # a null section
        ({"actor_rollout_ref": None}, False),
        ({"actor_rollout_ref": {"actor": {}}}, False),
    ],
)
def test_a_program_without_an_actor_is_named(config: dict[str, Any], missing: bool) -> None:
    assert bool(list(find_missing_actor(OmegaConf.create(config)))) is missing


@pytest.mark.parametrize("name", ["${oc.env:NOT_SET_AT_ALL}", "${not.here}"])
def test_keys_made_of_an_interpolation_of_nothing_are_not_blamed(name: str) -> None:
    config = OmegaConf.create({"a": {"folder": "runs/${name}", "other": "${oc.select:name,x}"}, "name": name})
    assert [problem.key for problem in find_unresolved_interpolations(config)] == ["name"]


def test_what_verl_ships_counts_as_not_set(base: DictConfig) -> None:
    """The defaults that the check compares with are those of the installed verl."""
    assert find_changed_keys(base) == {}
    assert set(base.algorithm.rollout_correction) > {"rollout_is", "rollout_rs", "bypass_mode"}
    assert find_changed_keys(changed(base, {f"{VERL}.rollout_is": "token"})) == {"rollout_is": "token"}


def test_verl_itself_must_be_where_it_was(base: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.preflight.checks import seams
    from verl_patches.contract import PatchError

    def moved(*_: object) -> None:
        raise PatchError("set_loss_fn is not where the adapter expects it. Install verl==0.9.1.")

    monkeypatch.setattr(seams, "check_contracts", moved)
    (problem,) = problems(base, {})
    assert problem.startswith("verl=")
    assert "Install verl==0.9.1" in problem


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"correction.masks.gsm.lower": 1.005}, "correction.masks.gsm.lower=1.005", "<= 1"),
        ({"correction.masks.gsm.upper": 0.995}, "correction.masks.gsm.upper=0.995", ">= 1"),
        ({"correction.weight.upper": 0.9}, "correction.weight.upper=0.9", ">= 1"),
        ({"correction.weight.upper": None, "correction.weight.lower": 1.1}, "correction.weight.lower=1.1", "<= 1"),
    ],
)
def test_bounds_that_leave_out_agreement_stop(base: DictConfig, changes: dict[str, Any], key: str, fix: str) -> None:
    (problem,) = problems(base, changes)
    assert key in problem
    assert "leave out 1" in problem
    assert fix in problem


@pytest.mark.parametrize(("upper", "said"), [(10.0, False), (10.5, True), (None, True)])
def test_a_wide_cap_is_remarked_on(base: DictConfig, upper: float | None, said: bool) -> None:
    config = changed(base, {"correction.weight.upper": upper})
    lines = list(map(str, collect_problems(REMARKS, config, run_checks(config))))
    assert bool(lines) is said
    assert all("correction.weight.upper" in line for line in lines)


def test_another_rollout_engine_stops(base: DictConfig) -> None:
    """One without log-probs; those that were never run start with a note, and the first update checks mu."""
    (problem,) = problems(base, {"actor_rollout_ref.rollout.name": "hf"})
    assert problem.startswith("actor_rollout_ref.rollout.name=hf: ")
    for engine in ("vllm", "sglang", "trtllm", "dynamo"):  # the last is registered by a program of its own
        assert problems(base, {"actor_rollout_ref.rollout.name": engine}) == []
    (problem,) = problems(base, {"actor_rollout_ref.rollout.name": "vlm"})
    assert "Did you mean vllm?" in problem
