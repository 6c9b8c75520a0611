"""Remarks on settings that are probably unintended, or that have not been tested with a correction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from verl_patches.execution_path import FULLY_ASYNC

from ...correction.problem import Problem, format_value
from ...correction.proximal import WITHOUT_FORWARD
from ...correction.recommended import BATCH_INVARIANT
from ..composed import (
    ACTOR,
    BATCH,
    BYPASS,
    ENGINE,
    ESTIMATOR,
    FSDP,
    KL_IN_REWARD,
    KL_LOSS,
    MEGATRON,
    MINI_BATCH,
    MODEL,
    NAME,
    OUTCOME,
    ROLLOUT,
    UNTESTED_ENGINES,
    VERL,
    WITHOUT_PI_OLD,
    Composed,
    list_micro_batch_keys,
    name_part,
)
from .correction import list_masks, list_weights

WIDE_CAP = 10.0
_SHORT = 256
"""Largest ``max_response_length`` for which answers count as short."""
_NOISE = 0.04
"""Standard deviation of a token's log(pi_old / mu), in nats. With this noise, [0.99, 1.01] keeps 0.65 of 14-token
answers; with a bfloat16 engine, it kept 0.61 and 0.64 (docs/evidence/real_model.md)."""
_LORA_RANK = f"{MODEL}.lora_rank"
_TO_KL_LOSS = {KL_IN_REWARD: False, KL_LOSS: True}
_ABOVE_ONE = {
    f"{ACTOR}.ulysses_sequence_parallel_size": "sequences split over ranks (Ulysses)",
    f"{FSDP}.ulysses_sequence_parallel_size": "sequences split over ranks (Ulysses)",
    f"{MEGATRON}.context_parallel_size": "sequences split over ranks (context parallelism)",
    f"{MEGATRON}.virtual_pipeline_model_parallel_size": "interleaved pipelines",
    f"{ROLLOUT}.data_parallel_size": "data parallelism within a rollout server",
    f"{ROLLOUT}.expert_parallel_size": "expert parallelism within a rollout server",
    f"{ROLLOUT}.pipeline_model_parallel_size": "pipelines within a rollout server",
    _LORA_RANK: "LoRA with this trainer",
    f"{MODEL}.lora.rank": "LoRA on Megatron",
}
_TRUE = {
    f"{MODEL}.use_fused_kernels": "fused kernels of the log-probs",
    f"{MODEL}.use_liger": "Liger's kernels",
    f"{MODEL}.tiled_mlp.enabled": "a tiled MLP",
    f"{MODEL}.mtp.enable": "multi-token prediction",
    f"{ACTOR}.use_prefix_grouper": "grouped prefixes",
    f"{ROLLOUT}.disaggregation.enabled": "prefill separate from decoding",
    "async_training.use_trainer_do_validate": "validation on the trainer's devices",
    "async_training.use_dynamic_resource_scheduling": "rollouts on the trainer's devices",
    f"{FSDP}.qat.enable": "training for quantised weights",
    f"{MEGATRON}.qat.enable": "training for quantised weights",
    f"{ACTOR}.freeze_vision_tower": "models with images",
}
_SET = {
    f"{ROLLOUT}.quantization": "a quantised rollout engine",
    f"{ENGINE}.quantization": "a quantised rollout engine",
    f"{ROLLOUT}.limit_images": "models with images",
    f"{MODEL}.lora_adapter_path": "LoRA that starts from an adapter",
    f"{MODEL}.lora.adapter_path": "LoRA that starts from an adapter",
    f"{ENGINE}.speculative_config": "speculative decoding",
}
_DTYPES = (f"{ROLLOUT}.dtype", f"{ENGINE}.kv_cache_dtype", f"{ENGINE}.kv-cache-dtype")


def warn_level_version(run: Composed) -> Iterator[Problem]:
    """Warn that ``level=version`` equals ``level=sequence`` in synchronous training."""
    if "version" in run.spec.levels and not run.asynchronous:
        reason = "in synchronous training each row has one version, so this equals level=sequence."
        yield run.problem("level", reason, verdict="NOTE", value="version")


def warn_wide_caps(run: Composed) -> Iterator[Problem]:
    """Warn of caps so high that single tokens or sequences may dominate the gradient."""
    why = f"above {WIDE_CAP:g}, single tokens or rows can dominate the gradient; usual: 2 per token, 5 per sequence."
    for part, weight in list_weights(run):
        if weight.power is not None and weight.rate is not None:
            greatest = math.exp(weight.rate - weight.power) * (weight.power / weight.rate) ** weight.power
            if greatest > WIDE_CAP:
                reason, key = f"the greatest weight is {greatest:.3g}; {why}", f"correction.{part}.rate"
                yield run.problem(key, reason, "", {key: weight.power}, (part,), "NOTE", value=weight.rate)
        elif weight.upper is None or weight.upper > WIDE_CAP:
            key, cap = f"correction.{part}.upper", 2.0 if weight.level == "token" else 5.0
            yield run.problem(key, why, "", {key: cap}, (part,), "NOTE", value=weight.upper)
    bound = run.verls.get("rollout_is_threshold")
    if run.verls.get("rollout_is") and isinstance(bound, int | float) and bound > WIDE_CAP:
        key = f"{VERL}.rollout_is_threshold"
        yaml = " YAML and Hydra read an unquoted 2_5 as 25." if isinstance(bound, int) else ""
        yield run.problem(key, f"{why}{yaml}", "", {key: 2.0}, (name_part("rollout_is"),), "NOTE")


def warn_short_answers(run: Composed) -> Iterator[Problem]:
    """Warn of geometric bands so narrow that the noise of a 16-bit engine rejects short answers.

    Independent noise per token moves the mean over T tokens by ``_NOISE / sqrt(T)``.
    """
    key = "data.max_response_length"
    longest, dtype = run.get(key), str(run.get(f"{ROLLOUT}.dtype"))
    if not isinstance(longest, int) or not 0 < longest <= _SHORT or dtype in ("float32", "float") or run.asynchronous:
        return
    tokens = max(1, longest // 4)
    for name, mask in list_masks(run):
        if mask.aggregate != "geometric" or mask.ratio == "ppo" or mask.lower is None or mask.upper is None:
            continue
        band = min(-math.log(mask.lower), math.log(mask.upper))
        kept = math.erf(band * math.sqrt(tokens / 2) / _NOISE)
        if 0 < kept < 0.98:
            reason = (
                "noise averages out over long answers only, and this band may reject many short ones: [0.99, 1.01] "
                "kept 0.61 of the tokens of a 135 M model with a bfloat16 engine, in answers of 14 tokens "
                "(docs/evidence/real_model.md)."
            )
            fix = "Record some steps (offpolicy.record.dir), and set the bounds with offpolicy calibrate."
            at = f"correction.{name}.upper"
            yield run.problem(at, reason, fix, (), (name,), "NOTE", (key,))


def warn_no_staleness(run: Composed) -> Iterator[Problem]:
    """Warn of masks on pi / mu if pi is pi_old.

    In asynchronous training, pi_old / mu contains the staleness, so these masks still measure the staleness.
    """
    trainers = run.spec.proximal in ("recompute", "reuse", "same_engine")
    if not trainers or run.steps != 1 or run.asynchronous:
        return
    reason = (
        "a batch gets one gradient step, at which pi is pi_old: the staleness term pi / pi_old is always 1, "
        "and only pi_old / mu is measured."
    )
    for name, mask in list_masks(run):
        if mask.ratio == "full":
            key, parts = f"correction.{name}.ratio", (f"{name}.staleness",)
            fix = (
                f"Set {key}=rollout, which states this explicitly; or {MINI_BATCH} below {BATCH}, which changes "
                "training."
            )
            yield run.problem(key, reason, fix, {key: "rollout"}, parts, "NO-OP", value="full")


def warn_unlike_micro_batches(run: Composed) -> Iterator[Problem]:
    """Warn of unequal micro-batches for pi_old and pi, whose kernels round differently (verl issue 6280)."""
    bypassed = run.spec.proximal in WITHOUT_FORWARD or run.verls.get(BYPASS)
    if bypassed or (run.spec.is_none and not run.active):
        return
    (ours, theirs), sizes = list_micro_batch_keys(run)
    if bool(run.actor.use_dynamic_bsz) == bool(run.rollout.log_prob_use_dynamic_bsz):
        ours, theirs = sizes
    elif run.path.worker == "engine":
        return  # check_micro_batches stops it
    trained, scored, key = run.actor.get(ours), run.rollout.get(theirs), f"{ROLLOUT}.{theirs}"
    if trained is not None and scored is not None and trained != scored:
        reason = (
            f"pi_old and pi are computed in different micro-batches ({ACTOR}.{ours}={format_value(trained)}). "
            f"Kernels may round differently, so pi / pi_old may not be exactly 1 at the first step."
        )
        yield run.problem(key, reason, "", {key: trained}, ("pi_old",), "NOTE")


def warn_one_seed(run: Composed) -> Iterator[Problem]:
    """Warn of verl's deterministic rollouts, in which all requests to one server have the same seed."""
    key, samples = f"{ROLLOUT}.full_determinism", f"{ROLLOUT}.n"
    if run.get(key) and run.get(NAME) == "vllm" and run.get(samples, 1) > 1:
        reason = (
            "verl gives every request to a server the same seed, so a prompt's rollouts on that server are "
            "identical, and their advantages are 0."
        )
        fix = f"Use this setting only for debugging. For training, {BATCH_INVARIANT}."
        yield run.problem(key, reason, fix, {key: False}, (), "NOTE", (samples,), value=True)


def warn_kl_left_out(run: Composed) -> Iterator[Problem]:
    """Warn of KL terms that are not corrected."""
    spec, parts = run.spec, ("kl_loss",)
    loses_kl = bool(run.actor.use_kl_loss) and run.actor.kl_loss_coef != 0
    fix = f"Set {KL_LOSS}=false if this is unintended."
    if loses_kl and (why := _explain_kl_left_out(run)):
        yield run.problem(KL_LOSS, why, fix, (), parts, "NOTE", value=True)
    if spec.masks and spec.kl_clip is None and spec.kl_weight is None and loses_kl:
        reason = "masks act only on the policy term, so rejected tokens keep the gradient of the KL loss."
        overrides: tuple[str, ...] = ()
        if run.steps != 1:
            fix = "Usually fine. correction.kl_clip bounds the ratio of the KL loss:"
            overrides = ("++correction.kl_clip={lower: 0.8, upper: 1.2}",)
        yield run.problem(KL_LOSS, reason, fix, overrides, parts, "NOTE", value=True)
    bypassed = spec.proximal == "bypass" or (spec.is_none and run.verls.get(BYPASS))
    if run.get(KL_IN_REWARD) and bypassed:
        reason = (
            "pi_old is mu here, so the reward is charged for the rollout engine's distance from the reference, "
            "including the mismatch."
        )
        fix = f"Set {KL_IN_REWARD}=false and {KL_LOSS}=true, which changes training."
        yield run.problem(KL_IN_REWARD, reason, fix, _TO_KL_LOSS, ("kl_in_reward",), "NOTE", value=True)


def _explain_kl_left_out(run: Composed) -> str | None:
    """Explain why verl's own correction leaves the KL loss unchanged; None if it changes the KL loss.

    verl's weights multiply only the policy term. Its rejections change the mask, which the KL loss also reads. In
    bypass mode, however, only the policy term uses the changed mask.
    """
    if "rollout_rs" in run.active and BYPASS in run.active:
        said = (
            "verl's rollout_rs acts only on the policy term in bypass mode, so rejected tokens keep the gradient of "
            "the KL"
        )
        return f"{said} loss."
    return (
        "verl's rollout_is acts only on the policy term, so the KL loss is not weighted."
        if "rollout_is" in run.active
        else None
    )


def warn_collapsed_rewards(run: Composed) -> Iterator[Problem]:
    """Warn of token-level rewards or discounts if the estimator sums each sequence first."""
    estimator, parts = str(run.get(ESTIMATOR)), ("dense_reward",)
    if estimator not in OUTCOME:
        return
    if run.get(KL_IN_REWARD) and run.get("algorithm.kl_ctrl.kl_coef") != 0:
        reason = (
            f"the penalty is given per token, but {ESTIMATOR}={estimator} sums a row to one outcome before its "
            "baseline, so the row is charged for the KL of all of its tokens, and no token for its own KL."
        )
        fix = (
            f"Set {KL_IN_REWARD}=false and {KL_LOSS}=true to charge each token for its own KL, which changes training."
        )
        yield run.problem(KL_IN_REWARD, reason, fix, _TO_KL_LOSS, parts, "NOTE", value=True)
    for key, reader in (("algorithm.gamma", "reinforce_plus_plus"), ("algorithm.lam", "gae")):
        by_turn = key == "algorithm.gamma" and run.get("turn_credit") is not None
        if run.get(key) not in (None, 1, 1.0) and not by_turn:
            reason = f"{ESTIMATOR}={estimator} sums a row to one outcome and discounts nothing."
            fix = f"Set {key}=1.0, or {ESTIMATOR}={reader}, which changes training."
            yield run.problem(key, reason, fix, {key: 1.0}, parts, "NOTE")


def warn_not_shown(run: Composed) -> Iterator[Problem]:
    """Warn of devices, estimators, kernels and layouts that have not been tested with a correction."""
    for key, value, what in () if run.spec.is_none and not run.active else _find_not_shown(run):
        reason = f"corrections are not tested with {what}: the first update proves this one, or stops the run."
        if key in _DTYPES or key.endswith(".quantization"):
            reason += (
                " Quantised weights cannot be compared with the trainer's; offpolicy.delivery.probe=1 compares answers."
            )
        yield run.problem(key, reason, "", (), (), "NOTE", value=value)


def _has_run_lora(run: Composed) -> bool:
    """Return True if this set-up of LoRA on FSDP was tested: any on V1, only merged LoRA on V0 and one_step_off_policy.

    docs/paths.md lists them.
    """
    merged = run.path.worker == "engine" and run.get(f"{MODEL}.lora.merge") and run.program != FULLY_ASYNC
    return run.path.trainer == "v1" or bool(merged)


def _find_not_shown(run: Composed) -> Iterator[tuple[str, Any, str]]:
    if (engine := run.get(NAME)) not in (None, "vllm"):
        owner = "this" if engine in UNTESTED_ENGINES else "a program's own"
        condition = "which must return the log-probs of the sampled tokens at the run's temperature"
        yield NAME, engine, f"{owner} rollout engine, {condition}"
    if (device := run.get("trainer.device")) not in (None, "cuda", "cpu"):
        yield "trainer.device", device, f"{device} devices"
    if (estimator := run.get(ESTIMATOR)) is not None and estimator not in WITHOUT_PI_OLD:
        yield ESTIMATOR, estimator, "estimators that read pi_old, or that are the user's own"
    for key in _DTYPES:
        if "fp8" in str(value := run.get(key)) or "int8" in str(value):
            yield key, value, f"rollouts in {value}"
    for key, what in _ABOVE_ONE.items():
        was_run = (run.path.worker == "legacy" and "ulysses" in key) or (key == _LORA_RANK and _has_run_lora(run))
        least = 0 if "lora" in key else 1
        if not was_run and isinstance(value := run.get(key), int) and value > least:
            yield key, value, what
    yield from ((key, True, what) for key, what in _TRUE.items() if run.get(key) is True)
    yield from ((key, value, what) for key, what in _SET.items() if (value := run.get(key)) not in (None, ""))
