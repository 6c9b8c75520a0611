"""What a run may do and rarely means to: told at the start, and no reason to stop."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from ...correction import CorrectionSpec
from ...correction.problem import Problem, format_value, set_to
from ...correction.proximal import WITHOUT_FORWARD
from ..verl_keys.estimators import OUTCOME
from ..verl_keys.keys import BYPASS, VERL, active, own, part
from .config_reader import ACTOR, ROLLOUT, gradient_steps
from .gradient_steps import two_steps

WIDE_CAP = 10.0


def wide_caps(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Bounds above which single tokens or rows own the gradient."""
    why = f"above {WIDE_CAP:g} single tokens or rows can own the gradient; 2 by token and 5 by sequence are usual."
    if spec.weight is not None and (spec.weight.upper is None or spec.weight.upper > WIDE_CAP):
        cap = 2.0 if spec.weight.level == "token" else 5.0
        key = "correction.weight.upper"
        yield Problem(key, spec.weight.upper, why, "", "NOTE", ("weight",), (set_to(key, cap),))
    values = own(config)
    bound = values.get("rollout_is_threshold")
    if values.get("rollout_is") and isinstance(bound, int | float) and bound > WIDE_CAP:
        key = f"{VERL}.rollout_is_threshold"
        yaml = " YAML and Hydra read an unquoted 2_5 as 25." if isinstance(bound, int) else ""
        yield Problem(key, bound, f"{why}{yaml}", "", "NOTE", (part("rollout_is"),), (set_to(key, 2.0),))


def level_version(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """One version a row is one weight a row."""
    if "version" in spec.levels:
        reason = "in synchronous training each row has one version, and this is level=sequence."
        yield Problem("level", "version", reason, "", "NOTE")


def no_staleness(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Masks on pi / mu where pi is pi_old: what they would see of the updates is not there.

    In asynchronous training pi_old / mu holds the age of the weights, and these masks have that to see.
    """
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode") if OmegaConf.select(config, "trainer.use_v1") else "sync"
    if spec.proximal not in ("recompute", "reuse") or gradient_steps(config) != 1 or mode not in (None, "sync"):
        return
    for name, mask in spec.masks:
        if mask.ratio == "full":
            key = f"correction.masks.{name}.ratio"
            yield Problem(
                key,
                "full",
                "a batch gets one gradient step, at which pi is pi_old: the staleness term pi / pi_old is always 1, "
                "and pi_old / mu is all that is seen.",
                f"Set {ACTOR}.ppo_mini_batch_size below data.train_batch_size, or {key}=rollout if that is meant.",
                "INERT",
                (f"masks.{name}.staleness",),
                two_steps(config) if spec.proximal == "recompute" else (set_to(key, "rollout"),),
            )


def unlike_micro_batches(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """pi_old and pi computed in micro-batches of other sizes, whose kernels round differently (verl issue 6280)."""
    bypassed = spec.proximal in WITHOUT_FORWARD or own(config).get(BYPASS)
    if bypassed or (spec.is_none and not active(config)):
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
    yield Problem(
        key,
        scored,
        f"pi_old is computed in other micro-batches than pi ({ACTOR}.{ours}={format_value(trained)}): kernels may "
        f"round differently, so that pi / pi_old is not exactly 1 at the first step.",
        f"Set {key}={format_value(trained)}.",
        "NOTE",
        ("pi_old",),
        (set_to(key, trained),),
    )


def kl_left_out(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """KL terms that the correction, ours or verl's own, does not reach."""
    actor = config.actor_rollout_ref.actor
    corrects = spec.weight is not None or bool(spec.masks)
    loses_kl = bool(actor.use_kl_loss) and actor.kl_loss_coef != 0
    if loses_kl and (why := _kl_beside_verls_own(config)):
        fix = f"Set {ACTOR}.use_kl_loss=false if that is not meant."
        yield Problem(f"{ACTOR}.use_kl_loss", True, why, fix, "NOTE", ("kl_loss",))
    if corrects and spec.kl_clip is None and loses_kl:
        steps = gradient_steps(config)
        yield Problem(
            f"{ACTOR}.use_kl_loss",
            True,
            "weight and masks are of the policy term: rejected tokens keep the gradient of the KL loss.",
            "Set correction.kl_clip.lower=0.8 and correction.kl_clip.upper=1.2 to bound its ratio."
            if steps != 1
            else f"Set {ACTOR}.use_kl_loss=false if that is not meant.",
            "NOTE",
            ("kl_loss",),
            ("++correction.kl_clip={lower: 0.8, upper: 1.2}",) if steps != 1 else (),
        )
    bypassed = spec.proximal == "bypass" or (spec.is_none and own(config).get(BYPASS))
    if OmegaConf.select(config, "algorithm.use_kl_in_reward") and bypassed:
        key = "algorithm.use_kl_in_reward"
        yield Problem(
            key,
            True,
            "pi_old is mu here, so that the reward is charged for the rollout engine's distance from the reference, "
            "mismatch included.",
            f"Set {key}=false and {ACTOR}.use_kl_loss=true.",
            "INERT",
            ("kl_in_reward",),
            (set_to(key, False), set_to(f"{ACTOR}.use_kl_loss", True)),
        )


def _kl_beside_verls_own(config: DictConfig) -> str | None:
    """What of verl's own correction leaves the KL loss as it is.

    Its weights multiply the policy term. Its rejections change the mask that the KL loss reads too, except in bypass
    mode, where the policy term alone is given theirs.
    """
    asked = active(config)
    if "rollout_rs" in asked and BYPASS in asked:
        return (
            "verl's rollout_rs is of the policy term in bypass mode: rejected tokens keep the gradient of the KL loss."
        )
    if "rollout_is" in asked:
        return "verl's rollout_is is of the policy term: the KL loss is not weighed."
    return None


def collapsed_rewards(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Rewards by token, or their discount, under an estimator that sums a row first."""
    estimator = str(OmegaConf.select(config, "algorithm.adv_estimator"))
    if estimator not in OUTCOME:
        return
    key = "algorithm.use_kl_in_reward"
    if OmegaConf.select(config, key) and OmegaConf.select(config, "algorithm.kl_ctrl.kl_coef") != 0:
        yield Problem(
            key,
            True,
            f"the penalty is given by token, and algorithm.adv_estimator={estimator} sums a row to one outcome before "
            f"its baseline: the row is charged for the KL of all of its tokens, and no token for its own.",
            f"Set {key}=false and {ACTOR}.use_kl_loss=true to charge each token for its own.",
            "NOTE",
            ("dense_reward",),
            (set_to(key, False), set_to(f"{ACTOR}.use_kl_loss", True)),
        )
    for key, reader in (("algorithm.gamma", "reinforce_plus_plus"), ("algorithm.lam", "gae")):
        if (value := OmegaConf.select(config, key)) not in (None, 1, 1.0):
            yield Problem(
                key,
                value,
                f"algorithm.adv_estimator={estimator} sums a row to one outcome, and discounts nothing.",
                f"Set {key}=1.0, or algorithm.adv_estimator={reader}.",
                "INERT",
                ("dense_reward",),
                (set_to(key, 1.0),),
            )
