"""Remarks on configurations that train as they say and are rarely meant."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from ...correction import CorrectionSpec
from ...correction.problem import Problem, format_value, set_to
from ...correction.proximal import WITHOUT_FORWARD
from ..old_log_prob import count_gradient_steps
from ..verl_keys.estimators import OUTCOME
from ..verl_keys.keys import BYPASS, VERL, list_active, name_part, read_rollout_correction
from .config_reader import ACTOR, ROLLOUT
from .staleness import is_asynchronous

WIDE_CAP = 10.0
_KL_LOSS, _KL_IN_REWARD = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
_TO_KL_LOSS = (set_to(_KL_IN_REWARD, False), set_to(_KL_LOSS, True))


def warn_wide_caps(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of bounds above which single tokens or rows dominate the gradient."""
    why = f"above {WIDE_CAP:g} single tokens or rows can own the gradient; 2 by token and 5 by sequence are usual."
    for part, weight in spec.all_weights.items():
        if weight.upper is None or weight.upper > WIDE_CAP:
            cap = 2.0 if weight.level == "token" else 5.0
            key = f"correction.{part}.upper"
            yield Problem(key, weight.upper, why, "", "NOTE", (part,), (set_to(key, cap),))
    values = read_rollout_correction(config)
    bound = values.get("rollout_is_threshold")
    if values.get("rollout_is") and isinstance(bound, int | float) and bound > WIDE_CAP:
        key = f"{VERL}.rollout_is_threshold"
        yaml = " YAML and Hydra read an unquoted 2_5 as 25." if isinstance(bound, int) else ""
        yield Problem(key, bound, f"{why}{yaml}", "", "NOTE", (name_part("rollout_is"),), (set_to(key, 2.0),))


def warn_level_version(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn that ``level=version`` equals ``level=sequence`` in synchronous training."""
    if "version" in spec.levels and not is_asynchronous(config):
        reason = "in synchronous training each row has one version, and this is level=sequence."
        yield Problem("level", "version", reason, "", "NOTE")


def warn_no_staleness(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of masks on pi / mu where pi is pi_old, so that they see no update.

    In asynchronous training pi_old / mu holds the age of the weights, and these masks have that to see.
    """
    trainers = spec.proximal in ("recompute", "reuse", "same_engine")
    if not trainers or count_gradient_steps(config) != 1 or is_asynchronous(config):
        return
    for name, mask in spec.masks:
        if mask.ratio == "full":
            key, parts = f"correction.masks.{name}.ratio", (f"masks.{name}.staleness",)
            reason = (
                "a batch gets one gradient step, at which pi is pi_old: the staleness term pi / pi_old is always 1, "
                "and pi_old / mu is all that is seen."
            )
            smaller = f"{ACTOR}.ppo_mini_batch_size below data.train_batch_size, which changes training"
            fix = f"Set {key}=rollout, which says so; or {smaller}."
            yield Problem(key, "full", reason, fix, "NO-OP", parts, (set_to(key, "rollout"),))


def warn_unlike_micro_batches(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of unequal micro-batches for pi_old and pi, whose kernels round differently (verl issue 6280)."""
    bypassed = spec.proximal in WITHOUT_FORWARD or read_rollout_correction(config).get(BYPASS)
    if bypassed or (spec.is_none and not list_active(config)):
        return
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    dynamic = bool(actor.use_dynamic_bsz), bool(rollout.log_prob_use_dynamic_bsz)
    if dynamic[0] != dynamic[1]:
        ours, theirs = ("use_dynamic_bsz", "log_prob_use_dynamic_bsz")
    elif dynamic[0]:
        ours, theirs = ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu")
    else:
        ours, theirs = ("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu")
    trained, scored = actor.get(ours), rollout.get(theirs)
    if trained is None or scored is None or trained == scored:
        return
    key = f"{ROLLOUT}.{theirs}"
    reason = (
        f"pi_old is computed in other micro-batches than pi ({ACTOR}.{ours}={format_value(trained)}): kernels may "
        f"round differently, so that pi / pi_old is not exactly 1 at the first step."
    )
    yield Problem(key, scored, reason, "", "NOTE", ("pi_old",), (set_to(key, trained),))


def warn_kl_left_out(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of KL terms that no correction, ours or verl's own, reaches."""
    actor = config.actor_rollout_ref.actor
    corrects = bool(spec.all_weights) or bool(spec.masks)
    loses_kl, parts = bool(actor.use_kl_loss) and actor.kl_loss_coef != 0, ("kl_loss",)
    fix = f"Set {_KL_LOSS}=false if that is not meant."
    overrides: tuple[str, ...] = ()
    if loses_kl and (why := _explain_kl_left_out(config)):
        yield Problem(_KL_LOSS, True, why, fix, "NOTE", parts)
    if corrects and spec.kl_clip is None and spec.kl_weight is None and loses_kl:
        reason = "weight and masks are of the policy term: rejected tokens keep the gradient of the KL loss."
        if count_gradient_steps(config) != 1:
            fix = "Set correction.kl_clip.lower=0.8 and correction.kl_clip.upper=1.2 to bound its ratio."
            overrides = ("++correction.kl_clip={lower: 0.8, upper: 1.2}",)
        yield Problem(_KL_LOSS, True, reason, fix, "NOTE", parts, overrides)
    bypassed = spec.proximal == "bypass" or (spec.is_none and read_rollout_correction(config).get(BYPASS))
    if OmegaConf.select(config, _KL_IN_REWARD) and bypassed:
        reason = (
            "pi_old is mu here, so that the reward is charged for the rollout engine's distance from the reference, "
            "mismatch included."
        )
        fix = f"Set {_KL_IN_REWARD}=false and {_KL_LOSS}=true, which changes training."
        yield Problem(_KL_IN_REWARD, True, reason, fix, "NOTE", ("kl_in_reward",), _TO_KL_LOSS)


def _explain_kl_left_out(config: DictConfig) -> str | None:
    """Explain why verl's own correction leaves the KL loss as it is; None if it does not.

    Its weights multiply the policy term. Its rejections change the mask that the KL loss reads too, except in bypass
    mode, where the policy term alone is given theirs.
    """
    asked = list_active(config)
    if "rollout_rs" in asked and BYPASS in asked:
        return (
            "verl's rollout_rs is of the policy term in bypass mode: rejected tokens keep the gradient of the KL loss."
        )
    if "rollout_is" in asked:
        return "verl's rollout_is is of the policy term: the KL loss is not weighed."
    return None


def warn_collapsed_rewards(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Warn of token-level rewards or discounts under an estimator that sums each row first."""
    estimator = str(OmegaConf.select(config, "algorithm.adv_estimator"))
    if estimator not in OUTCOME:
        return
    parts = ("dense_reward",)
    if OmegaConf.select(config, _KL_IN_REWARD) and OmegaConf.select(config, "algorithm.kl_ctrl.kl_coef") != 0:
        reason = (
            f"the penalty is given by token, and algorithm.adv_estimator={estimator} sums a row to one outcome before "
            f"its baseline: the row is charged for the KL of all of its tokens, and no token for its own."
        )
        fix = f"Set {_KL_IN_REWARD}=false and {_KL_LOSS}=true to charge each token for its own, which changes training."
        yield Problem(_KL_IN_REWARD, True, reason, fix, "NOTE", parts, _TO_KL_LOSS)
    for key, reader in (("algorithm.gamma", "reinforce_plus_plus"), ("algorithm.lam", "gae")):
        if (value := OmegaConf.select(config, key)) not in (None, 1, 1.0):
            reason = f"algorithm.adv_estimator={estimator} sums a row to one outcome, and discounts nothing."
            fix = f"Set {key}=1.0, or algorithm.adv_estimator={reader}, which changes training."
            yield Problem(key, value, reason, fix, "NOTE", parts, (set_to(key, 1.0),))
