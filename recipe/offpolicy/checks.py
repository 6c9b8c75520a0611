"""Start-up checks: whatever would leave a configured correction dead, wrong or applied twice stops the run.

One set for the launch, ``--check`` and whoever else wants to know. Each check looks at the resolved configuration
and yields problems that name the key, its value and the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

import verl_patches
from verl_patches import engine_loss, legacy, trainer_v0, trainer_v1
from verl_patches.contract import PatchError

from .baseline import GROUP_ESTIMATORS
from .correction import CorrectionSpec, SpecError
from .correction.denominator import HAS_DENOMINATOR
from .correction.dialects.verl import VERL_DEFAULTS
from .correction.mask_spec import ON_RATIO
from .live_path import live_path, uncovered
from .verl_keys import dead_keys
from .watchdog import problems as watchdog_problems

WIDE_CAP = 10.0
_TRUTHS = ("allow_identical_log_probs", "allow_unrelated_log_probs", "resume_changed_correction")
_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"


@dataclass(frozen=True)
class Problem:
    """A key, the value it has, what is wrong with it, and the override that mends it."""

    key: str
    value: Any
    reason: str
    fix: str

    def __str__(self) -> str:
        # As Hydra spells it.
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        value = "null" if value is None else value
        return f"{self.key}={value}: {self.reason} {self.fix}".rstrip()


class CheckError(RuntimeError):
    """The configuration would train something else than it says."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def spec_of(config: DictConfig) -> CorrectionSpec:
    """The validated correction of a composed configuration."""
    node = config.get("correction")
    mapping: Any = None if node is None else OmegaConf.to_container(node, resolve=True)
    return CorrectionSpec.from_mapping(mapping)


def shadows_of(config: DictConfig) -> dict[str, CorrectionSpec]:
    """Corrections that are reported and not applied, by name, of a configuration that main has prepared."""
    node = OmegaConf.select(config, "offpolicy.shadow")
    mapping: Any = OmegaConf.to_container(node, resolve=True) if node else {}
    if not isinstance(mapping, dict):
        raise SpecError(f"offpolicy.shadow={mapping}: names, that main_offpolicy has not replaced by what they mean.")
    return {str(name): CorrectionSpec.from_mapping(values) for name, values in mapping.items()}


def run_checks(config: DictConfig) -> CorrectionSpec:
    """Run every check.

    Returns:
        The correction to train with.

    Raises:
        SpecError: the correction itself is malformed.
        CheckError: something around it makes it dead, wrong or double; all problems at once.
    """
    spec = spec_of(config)
    problems = [problem for check in CHECKS for problem in check(config, spec)]
    if problems:
        raise CheckError(problems)
    return spec


def advice(spec: CorrectionSpec) -> list[str]:
    """What is allowed and rarely meant."""
    lines = []
    if "version" in spec.levels:
        lines.append("level=version: in synchronous training each row has one version, and this is level=sequence.")
    if spec.weight is not None and (spec.weight.upper is None or spec.weight.upper > WIDE_CAP):
        lines.append(
            f"correction.weight.upper={'null' if spec.weight.upper is None else spec.weight.upper}: above {WIDE_CAP:g} "
            f"single tokens or rows can own the gradient; 2 by token and 5 by sequence are usual."
        )
    return lines


def _seams(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    path = live_path(config)
    trainer = trainer_v1 if path.trainer == "v1" else trainer_v0
    try:
        verl_patches.status()
        engine_loss.check()
        engine_loss.check(trainer.SEAMS)
        if path.worker == "legacy":
            legacy.check(path.strategy)
    except PatchError as error:
        yield Problem("verl", path.release, str(error), "")


def _path(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    for key, value, reason, fix in uncovered(config, live_path(config)):
        yield Problem(key, value, reason, fix)


def _own_keys(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if config.get("offpolicy") is None:
        yield Problem("offpolicy", None, "its keys have no values.", "Remove this override.")
        return
    for key in config.offpolicy:
        if key not in (*_TRUTHS, "shadow", "shadow_delta", "watchdog"):
            yield Problem(f"offpolicy.{key}", config.offpolicy[key], "unknown key.", f"Remove offpolicy.{key}.")
    for key in _TRUTHS:
        if not isinstance(value := OmegaConf.select(config, f"offpolicy.{key}"), bool):
            yield Problem(f"offpolicy.{key}", value, "not a truth value.", "Set true or false.")
    yield from (Problem(*problem) for problem in watchdog_problems(config))


def _bounds_without_agreement(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    banded = [
        (f"correction.masks.{name}", mask.lower, mask.upper, 1 if mask.aggregate in ON_RATIO else 0)
        for name, mask in spec.masks
    ]
    if spec.weight is not None:
        banded.append(("correction.weight", spec.weight.lower, spec.weight.upper, 1))
    for key, lower, upper, neutral in banded:
        reason = f"the bounds leave out {neutral}, the value for policies that agree, where nothing is to be corrected."
        if lower is not None and lower > neutral:
            yield Problem(f"{key}.lower", lower, reason, f"Set {key}.lower <= {neutral}.")
        if upper is not None and upper < neutral:
            yield Problem(f"{key}.upper", upper, reason, f"Set {key}.upper >= {neutral}.")


def _weight_beside_the_loss(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if spec.weight is not None and spec.weight.ratio == "full" and mode != "gpg":
        yield Problem(
            "correction.weight.ratio",
            "full",
            f"loss_mode {mode} has a ratio to the current policy of its own, which would count twice.",
            "Set actor_rollout_ref.actor.policy_loss.loss_mode=gpg, or correction.weight.ratio=rollout.",
        )


def _proximal(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    key, value = "correction.proximal", spec.proximal
    steps = gradient_steps(config)
    if value == "reuse" and steps != 1:
        yield Problem(
            key,
            value,
            f"the current policy is pi_old at the first gradient step alone, and a batch gets {steps:g}.",
            "Set actor_rollout_ref.actor.ppo_mini_batch_size=data.train_batch_size and ppo_epochs=1, or recompute.",
        )
    if value in ("reuse", "loglinear"):
        if OmegaConf.select(config, "algorithm.use_kl_in_reward"):
            reason = "the KL in the reward reads pi_old before the loss can say what it is."
            yield Problem(key, value, reason, "Set algorithm.use_kl_in_reward=false, or correction.proximal=recompute.")
        estimator = OmegaConf.select(config, "algorithm.adv_estimator")
        if "optimal_token_baseline" in str(estimator):
            reason = f"algorithm.adv_estimator={estimator} reads pi_old before the loss can say what it is."
            yield Problem(key, value, reason, "Set another estimator, or correction.proximal=recompute.")


def gradient_steps(config: DictConfig) -> float:
    """Optimizer steps that each batch gets."""
    actor = config.actor_rollout_ref.actor
    return config.data.train_batch_size / actor.ppo_mini_batch_size * actor.ppo_epochs


def _one_gradient_step(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """What looks at pi / pi_old needs a second gradient step on a batch to find them apart."""
    if spec.proximal != "recompute" or gradient_steps(config) != 1:
        return
    reason = "a batch gets one gradient step, at which pi is pi_old, so that it never acts."
    fix = "Set actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size, or remove it."
    for name, mask in spec.masks:
        if mask.ratio == "ppo":
            yield Problem(f"correction.masks.{name}.ratio", "ppo", reason, fix)
    if spec.kl_clip is not None:
        yield Problem("correction.kl_clip", spec.to_mapping()["kl_clip"], reason, fix)


def _unread_proximal(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    alone = spec.weight is None and not spec.masks and spec.kl_clip is None
    if spec.proximal != "recompute" and alone and mode == "gpg":
        reason = f"loss_mode {mode} has no ratio and reads no pi_old, so that nothing is corrected."
        fix = "Set actor_rollout_ref.actor.policy_loss.loss_mode=vanilla, or correction=none."
        yield Problem("correction.proximal", spec.proximal, reason, fix)


def _versions(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    path = live_path(config)
    reason = None
    if Version(path.release) < Version("0.9"):
        reason = f"verl {path.release} does not note which version of the weights sampled a row."
    elif path.trainer == "v1" and (mode := config.trainer.v1.trainer_mode) != "sync":
        reason = f"with trainer_mode={mode} a row can be sampled by several versions, and verl notes none by token."
    for name, part in {"correction": spec, **shadows_of(config)}.items():
        if "version" in part.levels and reason:
            key = "level" if name == "correction" else f"offpolicy.shadow={name}, level"
            yield Problem(key, "version", reason, "Set level=turn or level=sequence.")


def _order_of_skyrl(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if spec.skyrl_compat and not spec.masks:
        reason = "without a mask there is no order."
        yield Problem("correction.skyrl_compat", True, reason, "Set correction.skyrl_compat=false.")


def _kl_clip(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if spec.kl_clip is None:
        return
    actor = config.actor_rollout_ref.actor
    if not actor.use_kl_loss:
        yield Problem(
            "correction.kl_clip",
            spec.to_mapping()["kl_clip"],
            "there is no KL loss to clip.",
            "Set actor_rollout_ref.actor.use_kl_loss=true, or correction.kl_clip=null.",
        )
    elif actor.kl_loss_type in ("kl", "k1"):
        yield Problem(
            "actor_rollout_ref.actor.kl_loss_type",
            actor.kl_loss_type,
            "as a loss its gradient is zero on average, whatever the policies: nothing that a ratio could correct.",
            "Set kl_loss_type=k3+ or k2.",
        )


def _denominator(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if spec.denominator == "original":
        return
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode not in HAS_DENOMINATOR:
        reason = "it divides by no count, so that original and kept are one."
        fix = f"Set one of {', '.join(HAS_DENOMINATOR)}, or correction.denominator=original."
        yield Problem("actor_rollout_ref.actor.loss_agg_mode", actor.loss_agg_mode, reason, fix)
    if actor.shuffle:
        reason = "denominator=kept counts by mini-batch before the update, and shuffling deals them anew."
        yield Problem("actor_rollout_ref.actor.shuffle", True, reason, "Set it to false.")


def _baseline(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if spec.baseline == "include":
        return
    estimator = OmegaConf.select(config, "algorithm.adv_estimator")
    if estimator not in GROUP_ESTIMATORS:
        yield Problem(
            "algorithm.adv_estimator",
            estimator,
            "baseline=exclude takes rejected siblings out of a group, and this estimator has none or mixes them.",
            f"Set one of {', '.join(GROUP_ESTIMATORS)}, or correction.baseline=include.",
        )


def _rollout_log_probs(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if spec.is_none and not OmegaConf.select(config, "offpolicy.shadow"):
        return
    if not OmegaConf.select(config, f"{_ROLLOUT}.calculate_log_probs"):
        yield Problem(
            f"{_ROLLOUT}.calculate_log_probs",
            OmegaConf.select(config, f"{_ROLLOUT}.calculate_log_probs"),
            "without the engine's log-probs there is no mu to correct with.",
            "Set it to true.",
        )
    # verl has no default for the engine, and says so itself when it is left out.
    if (engine := OmegaConf.select(config, f"{_ROLLOUT}.name")) not in (None, "vllm"):
        reason = "what other engines return as log-probs is not checked."
        yield Problem(f"{_ROLLOUT}.name", engine, reason, "Set it to vllm.")
    # vLLM takes its arguments with either spelling.
    for key in (f"{_ROLLOUT}.logprobs_mode", f"{_ENGINE}.logprobs_mode", f"{_ENGINE}.logprobs-mode"):
        mode = OmegaConf.select(config, key, default="processed_logprobs")
        if mode != "processed_logprobs":
            yield Problem(
                key,
                mode,
                "raw log-probs leave temperature out, so mu is not the distribution that was sampled from.",
                "Set processed_logprobs.",
            )


def _truncated_sampling(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if spec.is_none and not OmegaConf.select(config, "offpolicy.shadow"):
        return
    if (
        not OmegaConf.select(config, f"{_ROLLOUT}.do_sample", default=True)
        or not config.actor_rollout_ref.rollout["temperature"]
    ):
        yield Problem(
            f"{_ROLLOUT}.temperature",
            config.actor_rollout_ref.rollout.temperature,
            "greedy decoding samples from no distribution that a ratio could correct.",
            f"Set {_ROLLOUT}.do_sample=true and a temperature > 0.",
        )
    if spec.allow_truncated_sampling:
        return
    neutral = {"top_p": (1, 1.0), "top_k": (-1, 0), "min_p": (0, 0.0), "repetition_penalty": (1, 1.0)}
    for name, values in neutral.items():
        for key in (f"{_ROLLOUT}.{name}", f"{_ENGINE}.{name}", f"{_ENGINE}.override_generation_config.{name}"):
            value = OmegaConf.select(config, key, default=None)
            if value is not None and value not in values:
                yield Problem(
                    key,
                    value,
                    "mu is renormalised over the tokens that are left, and pi_old is not: the ratio is off by the "
                    "mass that was cut.",
                    f"Set {key}={values[0]}, or say that it is meant: correction.allow_truncated_sampling=true.",
                )


def verl_correction_changes(config: DictConfig) -> dict[str, Any]:
    """Keys of verl's own ``algorithm.rollout_correction`` that differ from what verl ships."""
    own = OmegaConf.select(config, "algorithm.rollout_correction")
    if own is None:
        return {}
    values = OmegaConf.to_container(own, resolve=True)
    assert isinstance(values, dict)
    return {
        str(key): value for key, value in values.items() if key not in VERL_DEFAULTS or value != VERL_DEFAULTS[str(key)]
    }


def _verl_correction(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if spec.is_none:
        return
    for key, value in verl_correction_changes(config).items():
        yield Problem(
            f"algorithm.rollout_correction.{key}",
            value,
            "verl's own correction beside ours would correct twice.",
            f"Remove this override, or set correction=none. verl's default is {VERL_DEFAULTS.get(key)}.",
        )


def _dead_keys(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    for finding in dead_keys(config, spec, live_path(config)):
        yield Problem(*finding)


def _distillation(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if OmegaConf.select(config, "distillation.enabled", default=False):
        yield Problem(
            "distillation.enabled",
            True,
            "verl's distillation loss and the corrected loss take the same place in the worker.",
            "Set distillation.enabled=false.",
        )


def _base_loss(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    if spec.is_none:
        return
    from verl.utils.config import omega_conf_to_dataclass

    from .base_loss_probe import probe

    actor = config.actor_rollout_ref.actor
    try:
        actor_config = omega_conf_to_dataclass(actor)
    except Exception as error:
        yield Problem("actor_rollout_ref.actor", "...", f"verl does not take it: {error.__cause__ or error}", "")
        return
    try:
        wrong = probe(actor_config)
    except Exception as error:
        wrong = f"it fails on a small batch: {error}"
    if wrong:
        fix = (
            "Set actor_rollout_ref.actor.loss_scale_factor to a constant, such as data.max_response_length."
            if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None
            else "Set a loss_mode that weighs each token's policy term: vanilla, gspo, cispo, gpg, dppo_tv, sapo."
        )
        yield Problem(
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            f"{actor.policy_loss.loss_mode} (actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode})",
            f"{wrong}.",
            fix,
        )


Check = Callable[[DictConfig, CorrectionSpec], Iterator[Problem]]
CHECKS: tuple[Check, ...] = (
    _seams,
    _path,
    _own_keys,
    _bounds_without_agreement,
    _weight_beside_the_loss,
    _proximal,
    _unread_proximal,
    _one_gradient_step,
    _versions,
    _order_of_skyrl,
    _kl_clip,
    _denominator,
    _baseline,
    _rollout_log_probs,
    _truncated_sampling,
    _verl_correction,
    _dead_keys,
    _distillation,
    _base_loss,
)

__all__ = [
    "CHECKS",
    "CheckError",
    "Problem",
    "SpecError",
    "run_checks",
    "shadows_of",
    "spec_of",
    "verl_correction_changes",
]
