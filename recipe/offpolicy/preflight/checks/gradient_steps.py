"""Checks of pi_old's source and of ratios pi / pi_old against the gradient steps that a batch gets."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import USE_V1, count_prompts, describe_mode

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from ..old_log_prob import count_gradient_steps
from .config_reader import ACTOR
from .staleness import MODE, is_asynchronous

_MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
_KL = "algorithm.use_kl_in_reward"
_PARTS = ("proximal",)


def check_proximal(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that pi_old is the current policy where ``proximal`` says so, and that nothing reads it earlier."""
    key, value = "correction.proximal", spec.proximal
    steps = count_gradient_steps(config)
    recompute = (set_to(key, "recompute"),)
    if value == "reuse" and steps != 1:
        reason = f"the current policy is pi_old at the first gradient step alone, and a batch gets {steps:g}."
        one_step = f"{_MINI_BATCH}=data.train_batch_size and ppo_epochs=1, which changes training"
        yield Problem(key, value, reason, f"Set {key}=recompute; or {one_step}.", parts=_PARTS, overrides=recompute)
    if value == "same_engine" and (why := _explain_older_weights(config)):
        fix = "Set correction.proximal=recompute."
        yield Problem(key, value, f"{why}, and mu is not pi_old.", fix, parts=_PARTS, overrides=recompute)
    if value in ("reuse", "loglinear"):
        same = recompute if value == "reuse" else ()  # the same pi_old, computed; loglinear is another
        estimator = OmegaConf.select(config, "algorithm.adv_estimator")
        for reads, who, other in (
            (OmegaConf.select(config, _KL), "the KL in the reward", f"{_KL}=false"),
            ("optimal_token_baseline" in str(estimator), f"algorithm.adv_estimator={estimator}", "another estimator"),
        ):
            if reads:
                reason, fix = (
                    f"{who} reads pi_old before the loss can say what it is.",
                    f"Set {other}, or {key}=recompute.",
                )
                yield Problem(key, value, reason, fix, parts=_PARTS, overrides=same)


def _explain_older_weights(config: DictConfig) -> str | None:
    """Explain why rows may be sampled by older weights than those that their step begins with; None if none are."""
    if is_asynchronous(config):
        return f"{'='.join(describe_mode(config))} samples rows by older weights than those that train them"
    if OmegaConf.select(config, USE_V1):
        key = f"trainer.v1.{OmegaConf.select(config, MODE)}.parameter_sync_step"
        if (updates := OmegaConf.select(config, key)) not in (None, 1):
            return f"{key}={updates} hands the rollout engine the weights of one update in {updates}"
    return None


def check_ppo_ratio(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that ratios pi / pi_old get a second gradient step; at the first one they are 1."""
    if spec.proximal not in ("recompute", "same_engine") or count_gradient_steps(config) != 1:
        return
    reason = "a batch gets one gradient step, at which pi is pi_old, so that it never acts."
    fix = "Set actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size, which changes training."
    overrides = build_two_steps(config)
    for name, mask in spec.masks:
        if mask.ratio == "ppo":
            key = f"correction.masks.{name}.ratio"
            mend = f"Set {key}=rollout to look at pi_old / mu, or{fix[3:]}"
            yield Problem(key, "ppo", reason, mend, "NO-OP", (f"masks.{name}",), (set_to(key, "rollout"),))
    if spec.penalty is not None and spec.penalty.ratio == "ppo":
        key = "correction.penalty.ratio"
        mend = f"Set {key}=full to look at pi / mu, or{fix[3:]}"
        yield Problem(key, "ppo", reason, mend, "NO-OP", ("penalty",), (set_to(key, "full"),))
    if spec.kl_clip is not None:
        value = spec.to_mapping()["kl_clip"]
        yield Problem("correction.kl_clip", value, reason, fix, "NO-OP", ("kl_clip",), overrides)


def build_two_steps(config: DictConfig) -> tuple[str, ...]:
    """Build overrides that give a batch two gradient steps; two epochs if it cannot be halved."""
    batch = count_prompts(config)
    return (set_to(_MINI_BATCH, batch // 2) if batch % 2 == 0 else set_to(f"{ACTOR}.ppo_epochs", 2),)


def check_proximal_is_read(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that the loss has a ratio that reads pi_old."""
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    alone = not spec.all_weights and not spec.masks and not (spec.kl_clip or spec.kl_weight or spec.penalty)
    if spec.proximal != "recompute" and alone and mode == "gpg":
        reason = f"loss_mode {mode} has no ratio and reads no pi_old, so that nothing is corrected."
        fix = "Set actor_rollout_ref.actor.policy_loss.loss_mode=vanilla, or correction=none."
        yield Problem("correction.proximal", spec.proximal, reason, fix, "NO-OP", _PARTS)
