"""Each start-up check by itself: the key that it names, and that it passes what it is not about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.kl_weight import KlWeightSpec
from recipe.offpolicy.correction.penalty import PenaltySpec
from recipe.offpolicy.correction.problem import Problem
from recipe.offpolicy.preflight.checks import (
    bounds,
    gradient_steps,
    policy_loss,
    rollout,
    verl_rollout_correction,
    warnings,
)
from recipe.offpolicy.preflight.checks.config_reader import needs_mu
from recipe.offpolicy.preflight.old_log_prob import count_gradient_steps
from tests.support.corrections import GSM, TIS, band, opsm, spec

Check = Callable[[DictConfig, CorrectionSpec], Iterator[Problem]]
BOTH = spec(TIS, gsm=GSM)
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = "algorithm.rollout_correction"


def config(**changes: Any) -> DictConfig:
    """What the checks read, in verl's layout; a batch of 256 prompts gets one gradient step."""
    actor = {
        "ppo_mini_batch_size": 256,
        "ppo_epochs": 1,
        "policy_loss": {"loss_mode": "vanilla"},
        "loss_agg_mode": "token-mean",
        "shuffle": False,
        "use_kl_loss": False,
        "kl_loss_type": "low_var_kl",
        "kl_loss_coef": 0.001,
        "use_dynamic_bsz": False,
        "ppo_micro_batch_size_per_gpu": 2,
    }
    rollout = {"name": "vllm", "calculate_log_probs": True, "temperature": 1.0, "do_sample": True, "n": 4}
    rollout |= {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 2}
    algorithm = {"adv_estimator": "grpo", "use_kl_in_reward": False, "rollout_correction": None}
    made = OmegaConf.create(
        {
            "data": {"train_batch_size": 256},
            "actor_rollout_ref": {"actor": actor, "rollout": rollout},
            "algorithm": algorithm,
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(made, key, value, merge=False, force_add=True)
    return made


def test_gradient_steps_of_a_batch() -> None:
    assert count_gradient_steps(config()) == 1
    assert count_gradient_steps(config(**{f"{ACTOR}.ppo_mini_batch_size": 64, f"{ACTOR}.ppo_epochs": 2})) == 8


def test_two_steps_by_half_a_batch_or_by_two_epochs() -> None:
    assert gradient_steps.build_two_steps(config()) == (f"{ACTOR}.ppo_mini_batch_size=128",)
    assert gradient_steps.build_two_steps(config(**{"data.train_batch_size": 3})) == (f"{ACTOR}.ppo_epochs=2",)


def test_mu_is_needed_by_a_correction_and_by_shadows() -> None:
    assert needs_mu(config(), BOTH)
    assert not needs_mu(config(), CorrectionSpec())
    assert needs_mu(config(**{"offpolicy.shadow": ["gsm"]}), CorrectionSpec())


CASES: list[tuple[Check, dict[str, Any], CorrectionSpec, str]] = [
    (bounds.check_bounds_hold_agreement, {}, spec(TIS, gsm=band(1.005, 1.01)), "correction.masks.gsm.lower"),
    (bounds.check_bounds_in_reach, {}, spec(gsm=band(None, 1e30)), "correction.masks.gsm.upper"),
    (bounds.check_bounds_in_reach, {}, spec(gsm=band(1.0, 1.0)), "correction.masks.gsm.upper"),
    (bounds.warn_bounds_never_seen, {}, spec(opsm=opsm(19.0)), "correction.masks.opsm.delta"),
    (bounds.check_weight_ratio, {}, spec({**TIS, "ratio": "full"}), "correction.weight.ratio"),
    (bounds.check_skyrl_compat, {}, CorrectionSpec(skyrl_compat=True), "correction.skyrl_compat"),
    (bounds.check_token_aggregates, {}, spec({**TIS, "aggregate": "geometric"}), "correction.weight.aggregate"),
    (gradient_steps.check_proximal, {f"{ACTOR}.ppo_epochs": 2}, replace(BOTH, proximal="reuse"), "correction.proximal"),
    (
        gradient_steps.check_proximal,
        {"trainer.use_v1": True, "trainer.v1.trainer_mode": "separate_async"},
        CorrectionSpec(proximal="same_engine"),
        "correction.proximal",
    ),
    (gradient_steps.check_ppo_ratio, {}, spec(opsm=opsm(0.1, "ppo")), "correction.masks.opsm.ratio"),
    (
        gradient_steps.check_proximal_is_read,
        {f"{ACTOR}.policy_loss.loss_mode": "gpg"},
        CorrectionSpec(proximal="bypass"),
        "correction.proximal",
    ),
    (policy_loss.check_kl_clip, {}, CorrectionSpec(kl_clip=(0.8, 1.2)), "correction.kl_clip"),
    (
        policy_loss.check_kl_clip,
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0},
        CorrectionSpec(kl_clip=(0.8, 1.2)),
        f"{ACTOR}.kl_loss_coef",
    ),
    (policy_loss.check_kl_weight, {}, CorrectionSpec(kl_weight=KlWeightSpec("ppo")), "correction.kl_weight"),
    (
        policy_loss.check_kl_weight,
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0},
        CorrectionSpec(kl_weight=KlWeightSpec("full", 2.0)),
        f"{ACTOR}.kl_loss_coef",
    ),
    (
        policy_loss.check_kl_weight,
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "k3+"},
        CorrectionSpec(kl_weight=KlWeightSpec("full", 2.0)),
        f"{ACTOR}.kl_loss_type",
    ),
    (gradient_steps.check_ppo_ratio, {}, CorrectionSpec(penalty=PenaltySpec("ppo", 0.1)), "correction.penalty.ratio"),
    (
        policy_loss.check_denominator,
        {f"{ACTOR}.loss_agg_mode": "token-sum"},
        replace(BOTH, nonfinite="excluded"),
        f"{ACTOR}.loss_agg_mode",
    ),
    (policy_loss.check_denominator, {f"{ACTOR}.shuffle": True}, replace(BOTH, denominator="kept"), f"{ACTOR}.shuffle"),
    (
        policy_loss.check_baseline,
        {"algorithm.adv_estimator": "gae"},
        replace(BOTH, baseline="exclude"),
        "algorithm.adv_estimator",
    ),
    (policy_loss.check_baseline, {f"{ROLLOUT}.n": 1}, replace(BOTH, baseline="exclude"), f"{ROLLOUT}.n"),
    (policy_loss.check_distillation, {"distillation.enabled": True}, BOTH, "distillation.enabled"),
    (
        rollout.check_rollout_log_probs,
        {f"{ROLLOUT}.calculate_log_probs": False},
        BOTH,
        f"{ROLLOUT}.calculate_log_probs",
    ),
    (rollout.check_rollout_log_probs, {f"{ROLLOUT}.name": "hf"}, BOTH, f"{ROLLOUT}.name"),
    (
        rollout.check_logprobs_mode,
        {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        BOTH,
        f"{ROLLOUT}.logprobs_mode",
    ),
    (rollout.check_sampling, {f"{ROLLOUT}.temperature": 0}, BOTH, f"{ROLLOUT}.temperature"),
    (rollout.check_sampling, {f"{ROLLOUT}.top_p": 0.9}, BOTH, f"{ROLLOUT}.top_p"),
    (
        rollout.check_consent,
        {},
        CorrectionSpec(allow_truncated_sampling=True),
        "correction.allow_truncated_sampling",
    ),
    (
        verl_rollout_correction.check_not_both,
        {VERL: {"rollout_is": "token"}},
        BOTH,
        f"{VERL}.rollout_is",
    ),
    (
        verl_rollout_correction.check_thresholds,
        {VERL: {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.01"}},
        CorrectionSpec(),
        f"{VERL}.rollout_rs_threshold",
    ),
    (warnings.warn_wide_caps, {}, spec({**TIS, "upper": 11.0}), "correction.weight.upper"),
    (warnings.warn_level_version, {}, spec({**TIS, "level": "version"}), "level"),
    (
        warnings.warn_unlike_micro_batches,
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8},
        BOTH,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    ),
    (warnings.warn_kl_left_out, {f"{ACTOR}.use_kl_loss": True}, BOTH, f"{ACTOR}.use_kl_loss"),
    (warnings.warn_collapsed_rewards, {"algorithm.gamma": 0.9}, BOTH, "algorithm.gamma"),
    (warnings.warn_no_staleness, {}, spec(opsm=opsm(0.1)), "correction.masks.opsm.ratio"),
]


@pytest.mark.parametrize(
    ("check", "changes", "correction", "key"),
    CASES,
    ids=[f"{check.__name__}-{key.rpartition('.')[2]}" for check, _, _, key in CASES],
)
def test_what_a_check_names(check: Check, changes: dict[str, Any], correction: CorrectionSpec, key: str) -> None:
    assert [problem.key for problem in check(config(**changes), correction)] == [key]
    # Weight and mask in their usual bounds, with nothing changed, are no check's business.
    assert list(check(config(), BOTH)) == []


BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"


@pytest.mark.parametrize(
    ("device", "release", "dtype", "bucket", "proposed"),
    [
        ("cpu", "0.9.1", "fp32", 107, 109),  # 49 152 x 576 elements of 4 bytes are 108 MiB
        ("cpu", "0.9.1", "fp32", 108, None),
        ("cpu", "0.9.1", "bf16", 53, 55),
        ("cpu", "0.9.1", "bf16", 54, None),
        ("cuda", "0.9.1", "fp32", 16, None),  # it goes by a handle of its own
        ("cuda", "0.7.1", "fp32", 16, 109),
    ],
)
def test_a_bucket_smaller_than_the_largest_tensor_is_refused(
    device: str,
    release: str,
    dtype: str,
    bucket: int,
    proposed: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr("verl_patches.execution_path.installed_release", lambda name: release)
    (tmp_path / "config.json").write_text('{"vocab_size": 49152, "hidden_size": 576}')
    of_model = {"actor_rollout_ref.model": {"path": str(tmp_path)}, f"{ACTOR}.fsdp_config.model_dtype": dtype}
    of_path = {"trainer.device": device, f"{ACTOR}.strategy": "fsdp"}
    problems = list(rollout.check_bucket(config(**of_model, **of_path, **{BUCKET: bucket}), BOTH))
    assert [problem.overrides for problem in problems] == ([(f"{BUCKET}={proposed}",)] if proposed else [])
    without = {"actor_rollout_ref.model": {"path": str(tmp_path / "nowhere")}}
    assert list(rollout.check_bucket(config(**without, **of_path, **{BUCKET: bucket}), BOTH)) == []
