"""Checks of the correction itself (bounds, aggregates, pi_old, KL, denominator, baseline) against verl's keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from verl_patches.contract import demand_release, installed_release
from verl_patches.execution_path import USE_V1, count_prompts, describe_mode
from verl_patches.releases import attributes_of

from ...correction import MaskSpec, WeightSpec
from ...correction.decisions import GROUP_ESTIMATORS, HAS_DENOMINATOR
from ...correction.masks import compute_arithmetic_limit, compute_proposal_limit, get_usual_bounds
from ...correction.problem import Problem, Verdict, format_value
from ...correction.ratios import EXP_CLAMP
from ..composed import (
    ACTOR,
    BATCH,
    BYPASS,
    ESTIMATOR,
    KL_IN_REWARD,
    KL_LOSS,
    LOSS_MODE,
    MINI_BATCH,
    MODE,
    OUTCOME,
    PROXIMAL,
    ROLLOUT,
    VERL,
    Composed,
    name_part,
)

_KL_TYPE, _KL_COEF = f"{ACTOR}.kl_loss_type", f"{ACTOR}.kl_loss_coef"
_AGGREGATION, _SHUFFLE, _BASELINE = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.shuffle", "correction.baseline"
_UNBIASED = ("low_var_kl", "k3", "kl", "k1")
"""Values of verl's ``kl_loss_type`` for which the term's expectation over pi is KL(pi, pi_ref)."""
_ORDER = "correction.skyrl_compat"
_TWO_STEPS = f"{MINI_BATCH} below {BATCH}, which changes training"
_LEAVES_OUT = "the bounds exclude {neutral}, the value for equal policies, which need no correction."


def list_weights(run: Composed) -> list[tuple[str, WeightSpec]]:
    """List the weights of the correction by name."""
    return list(run.spec.all_weights.items())


def list_masks(run: Composed) -> list[tuple[str, MaskSpec]]:
    """List the masks of the correction, such as ``masks.gsm``."""
    return [(f"masks.{name}", mask) for name, mask in run.spec.masks]


def check_bounds(run: Composed) -> Iterator[Problem]:
    """Check that bounds contain the value for equal policies, and that values can exceed the bounds."""
    banded: list[tuple[str, MaskSpec | WeightSpec]] = [*list_masks(run), *list_weights(run)]
    for name, part in banded:
        neutral = 1 if not isinstance(part, MaskSpec) or part.entry.on_ratio else 0
        reason = _LEAVES_OUT.format(neutral=neutral)
        for side, bound, sign in (("lower", part.lower, "<="), ("upper", part.upper, ">=")):
            if bound is not None and (bound > neutral if side == "lower" else bound < neutral):
                at = f"correction.{name}.{side}"
                yield run.problem(at, reason, f"Set {at} {sign} {neutral}.", {at: neutral}, (name,), value=bound)
    for name, mask in list_masks(run):
        yield from _find_unreachable(run, name, mask)
        yield from _find_closed(run, name, mask)


def _find_unreachable(run: Composed, name: str, mask: MaskSpec) -> Iterator[Problem]:
    reason = f"log-ratios are clamped to +-{EXP_CLAMP:g} nats, a ratio of {math.exp(EXP_CLAMP):.3g}: this bound can "
    for bound, value, distance in _measure_distances(mask):
        if distance > compute_arithmetic_limit(mask):
            at, usual = f"correction.{name}.{bound}", _get_usual(mask, bound)
            open_side = ", or null if the other side has a bound" if bound in ("lower", "upper") else ""
            fix = f"Set {at}={format_value(usual)}, a usual value{open_side}."
            yield run.problem(at, f"{reason}never act.", fix, {at: usual}, (name,), value=value)


def _find_closed(run: Composed, name: str, mask: MaskSpec) -> Iterator[Problem]:
    """Find bands of width 0, which reject everything unless the two policies are identical."""
    neutral, one_sided = 1.0 if mask.entry.on_ratio else 0.0, mask.entry.one_sided
    if mask.entry.of_age or mask.upper != neutral or (mask.lower != neutral and not one_sided):
        return
    reason = (
        f"the mask keeps only the value {neutral:g}, which requires bitwise equal policies, and rejects "
        f"everything else."
    )
    sides = ("upper",) if one_sided else ("lower", "upper")
    sets = {f"correction.{name}.{side}": _get_usual(mask, side) for side in sides}
    yield run.problem(f"correction.{name}.upper", reason, "", sets, (name,), value=mask.upper)


def warn_bounds_never_seen(run: Composed) -> Iterator[Problem]:
    """Warn about bounds that were not reached in any recorded run."""
    for name, mask in list_masks(run):
        for bound, value, distance in _measure_distances(mask):
            if compute_proposal_limit(mask) < distance <= compute_arithmetic_limit(mask):
                at, usual = f"correction.{name}.{bound}", _get_usual(mask, bound)
                reason = "values beyond this bound occur only if the policies are unrelated, so it never acts. Usual: "
                yield run.problem(at, f"{reason}{format_value(usual)}.", "", {at: usual}, (name,), "NO-OP", value=value)


def _measure_distances(mask: MaskSpec) -> Iterator[tuple[str, float, float]]:
    """Yield each bound with its distance from the value at which the two policies agree, in the mask's own unit.

    For bounds that depend on age, this is the minimum over the ages.
    """
    least = min(mask.by_staleness or (1.0,))
    if mask.delta is not None:
        yield "delta", mask.delta, least * mask.delta
    elif mask.budget is not None:
        yield "budget", mask.budget, mask.budget
    else:
        for bound in ("lower", "upper"):
            if (value := getattr(mask, bound)) is not None:
                yield bound, value, least * abs(math.log(value)) if mask.entry.on_ratio else abs(value)


def _get_usual(mask: MaskSpec, bound: str) -> float | None:
    usual = {"delta": 0.1, "budget": 0.04}
    return usual[bound] if bound in usual else get_usual_bounds(mask.aggregate)[bound == "upper"]


def check_parts(run: Composed) -> Iterator[Problem]:
    """Reject aggregates over a single token, weights that are always 1, and ratios that are counted twice."""
    single = "level=token acts on single tokens, so there is nothing to aggregate."
    mode = run.actor.policy_loss.loss_mode
    for name, weight in list_weights(run):
        at, parts = f"correction.{name}", (name,)
        if weight.kind != "reject" and weight.lower == weight.upper == 1:
            reason = "with these bounds every weight is 1, and nothing is corrected."
            yield run.problem(f"{at}.upper", reason, "", {f"{at}.upper": 2.0}, parts, value=1.0)
        if weight.level == "token" and weight.aggregate != "product":
            key = f"{at}.aggregate"
            yield run.problem(key, single, "", {key: "product"}, parts, value=weight.aggregate)
        if weight.ratio == "full" and mode != "gpg":
            reason = (
                f"loss_mode {mode} already contains a ratio to the current policy, which would then be applied twice."
            )
            fix = f"Set {LOSS_MODE}=gpg, or {at}.ratio=rollout."
            yield run.problem(f"{at}.ratio", reason, fix, (), parts, value="full")
    for name, mask in list_masks(run):
        if mask.level == "token" and (instead := mask.entry.single):
            key = f"correction.{name}.aggregate"
            yield run.problem(key, single, "", {key: instead}, (name,), value=mask.aggregate)
    if run.spec.skyrl_compat and not run.spec.masks:
        fix, parts = "Add a mask, or set correction.skyrl_compat=false.", ("skyrl_compat",)
        yield run.problem(
            _ORDER, "without a mask, this order of operations has no effect.", fix, (), parts, "NO-OP", value=True
        )


def check_proximal(run: Composed) -> Iterator[Problem]:
    """Check that pi_old is what ``proximal`` specifies, and that no part reads pi_old before it exists."""
    value, parts = run.spec.proximal, ("proximal",)
    recompute = {PROXIMAL: "recompute"}
    if value == "reuse" and run.steps != 1:
        reason = (
            f"the current policy equals pi_old only at the first gradient step, but each batch gets "
            f"{run.steps:g} steps."
        )
        fix = f"Set {PROXIMAL}=recompute; or {MINI_BATCH}={BATCH} and ppo_epochs=1, which changes training."
        yield run.problem(PROXIMAL, reason, fix, recompute, parts, value=value)
    if value == "same_engine" and (why := _explain_older_weights(run)):
        fix = f"Set {PROXIMAL}=recompute."
        yield run.problem(PROXIMAL, f"{why}, so mu differs from pi_old.", fix, recompute, parts, value=value)
    if value in ("reuse", "loglinear"):
        same = recompute if value == "reuse" else {}  # recompute yields reuse's pi_old, but not loglinear's
        estimator = run.get(ESTIMATOR)
        for reads, who, other in (
            (run.get(KL_IN_REWARD), "the KL in the reward", f"{KL_IN_REWARD}=false"),
            ("optimal_token_baseline" in str(estimator), f"{ESTIMATOR}={estimator}", "another estimator"),
        ):
            if reads:
                reason, fix = f"{who} reads pi_old before the loss defines it.", f"Set {other}, or {PROXIMAL}="
                yield run.problem(PROXIMAL, reason, f"{fix}recompute.", same, parts, value=value)
    mode, spec = run.actor.policy_loss.loss_mode, run.spec
    alone = not spec.all_weights and not spec.masks and not (spec.kl_clip or spec.kl_weight or spec.penalty)
    if value != "recompute" and alone and mode == "gpg":
        reason = f"loss_mode {mode} does not use a ratio or pi_old, so nothing is corrected."
        yield run.problem(
            PROXIMAL, reason, f"Set {LOSS_MODE}=vanilla, or correction=none.", (), parts, "NO-OP", value=value
        )


def _explain_older_weights(run: Composed) -> str | None:
    """Explain why a step's rows may be sampled with weights older than those at its start; None if they cannot be."""
    if run.asynchronous:
        return (
            f"{'='.join(describe_mode(run.config))} samples rows with weights older than those at the start of the "
            f"step that trains them"
        )
    key = f"trainer.v1.{run.get(MODE)}.parameter_sync_step"
    if run.get(USE_V1) and (updates := run.get(key)) not in (None, 1):
        return f"{key}={updates} sends the weights to the rollout engine only after every {updates} updates"
    return None


def check_ppo_ratio(run: Composed) -> Iterator[Problem]:
    """Check that a batch gets a second gradient step if a part uses pi / pi_old, which is 1 at the first step."""
    spec = run.spec
    if spec.proximal not in ("recompute", "same_engine") or run.steps != 1:
        return
    reason = "a batch gets one gradient step, at which pi is pi_old, so this part never acts."
    looking: list[tuple[str, Any, str, str]] = [
        (name, mask, "rollout", "pi_old / mu") for name, mask in list_masks(run)
    ]
    looking += [("penalty", spec.penalty, "full", "pi / mu")] if spec.penalty is not None else []
    for name, part, ratio, meaning in looking:
        if part.ratio == "ppo":
            key = f"correction.{name}.ratio"
            fix = f"Set {key}={ratio} to use {meaning}, or {_TWO_STEPS}."
            yield run.problem(key, reason, fix, {key: ratio}, (name,), "NO-OP", value="ppo")
    if spec.kl_clip is not None:
        key, value = "correction.kl_clip", spec.to_mapping()["kl_clip"]
        yield run.problem(key, reason, f"Set {_TWO_STEPS}.", build_two_steps(run), ("kl_clip",), "NO-OP", value=value)


def build_two_steps(run: Composed) -> Mapping[str, Any]:
    """Build the settings for two gradient steps per batch; they use two epochs if the batch cannot be halved."""
    batch = count_prompts(run.config)
    return {MINI_BATCH: batch // 2} if batch % 2 == 0 else {f"{ACTOR}.ppo_epochs": 2}


def check_kl(run: Composed) -> Iterator[Problem]:
    """If a KL loss is clipped or weighted, check that it exists."""
    spec, kind = run.spec, run.actor.kl_loss_type
    no_ratio = "the gradient of this KL loss is zero on average for all policies, so no ratio can correct it."
    no_weight = "weighted by the ratio, only k1, or k3 with its own gradient, has the gradient of the reverse KL."
    for part, does, wrong, reason, kinds in (
        ("kl_clip", "clip", kind in ("kl", "k1"), no_ratio, ("k3+", "k2")),
        ("kl_weight", "weight", kind not in _UNBIASED, no_weight, _UNBIASED),
    ):
        off = f"or correction.{part}=null."
        if getattr(spec, part) is None:
            continue
        if not run.actor.use_kl_loss:
            missing, value = f"there is no KL loss to {does}.", spec.to_mapping()[part]
            fix = f"Set {KL_LOSS}=true, {off}"
            yield run.problem(f"correction.{part}", missing, fix, {KL_LOSS: True}, (part,), "NO-OP", value=value)
        elif run.actor.kl_loss_coef == 0:
            none = f"the KL loss to {does} has the coefficient 0, so it has no effect."
            yield run.problem(_KL_COEF, none, f"Set it to 0.001, {off}", {_KL_COEF: 0.001}, (part,), "NO-OP")
        elif wrong:
            fix = f"Set one of {', '.join(kinds)}, {off}"
            verdict: Verdict = "NO-OP" if part == "kl_clip" else "ERROR"
            yield run.problem(_KL_TYPE, reason, fix, {_KL_TYPE: kinds[0]}, (part,), verdict)


def check_denominator(run: Composed) -> Iterator[Problem]:
    """Check that ``denominator`` and ``nonfinite`` take effect: the loss needs a count; rows must not be shuffled."""
    if not run.spec.recounts:
        return
    kept = run.spec.denominator == "kept"
    key, value, usual = ("denominator", "kept", "original") if kept else ("nonfinite", "excluded", "counted")
    release = attributes_of(installed_release("verl") or demand_release())
    aggregation = release.find_policy_aggregation(run.get(LOSS_MODE), run.actor.loss_agg_mode)
    if aggregation not in HAS_DENOMINATOR:
        reason = f"this aggregation does not divide by a count, so {usual} and {value} are the same."
        fix = f"Set one of {', '.join(HAS_DENOMINATOR)}, or correction.{key}={usual}."
        yield run.problem(_AGGREGATION, reason, fix, {_AGGREGATION: "token-mean"}, (key,), "NO-OP")
    if run.actor.shuffle:
        reason = (
            f"{key}={value} is counted per mini-batch before the update, but shuffling assigns the rows to other "
            f"mini-batches."
        )
        yield run.problem(_SHUFFLE, reason, "Set it to false.", {_SHUFFLE: False}, (key,), value=True)


def check_baseline(run: Composed) -> Iterator[Problem]:
    """If ``baseline=exclude`` is set, check that the estimator uses groups."""
    if run.spec.baseline == "include":
        return
    why, off = "baseline=exclude removes rejected siblings from a group, but", f"or {_BASELINE}=include."
    key, reason, fix = ESTIMATOR, "this estimator has no groups or mixes them.", f"one of {', '.join(GROUP_ESTIMATORS)}"
    if run.get(ESTIMATOR) in GROUP_ESTIMATORS:
        if run.get(key := f"{ROLLOUT}.n") != 1:
            return
        reason, fix = "each prompt has only one rollout.", "2 or more rollouts per prompt"
    sets = {_BASELINE: "include"}
    yield run.problem(key, f"{why} {reason}", f"Set {fix}, {off}", sets, ("baseline",), "NO-OP")


def check_distillation(run: Composed) -> Iterator[Problem]:
    """Reject verl's distillation loss, which this package's loss would overwrite."""
    if run.get(key := "distillation.enabled"):
        reason = "verl's worker accepts one loss, so the correction's loss would replace the distillation loss."
        yield run.problem(key, reason, "No override keeps both: train either with distillation or with a correction.")


WIDE_CAP = 10.0
_SHORT = 256
"""Largest ``max_response_length`` for which answers count as short."""
_NOISE = 0.04
"""Standard deviation of a token's log(pi_old / mu), in nats. With this noise, [0.99, 1.01] keeps 0.65 of 14-token
answers; with a bfloat16 engine, it kept 0.61 and 0.64 (docs/evidence/real_model.md)."""
_TO_KL_LOSS = {KL_IN_REWARD: False, KL_LOSS: True}


def warn_level_version(run: Composed) -> Iterator[Problem]:
    """Warn that ``level=version`` equals ``level=sequence`` in synchronous training."""
    if "version" in run.spec.levels and not run.asynchronous:
        reason = "in synchronous training one version samples each row, so level=version is the same as level=sequence."
        yield run.problem("level", reason, verdict="NOTE", value="version")


def warn_wide_caps(run: Composed) -> Iterator[Problem]:
    """Warn about caps that are so high that single tokens or sequences may dominate the gradient."""
    why = (
        f"above {WIDE_CAP:g}, single tokens or rows can dominate the gradient; usual caps are 2 per token and 5 per "
        f"sequence."
    )
    for part, weight in list_weights(run):
        if weight.power is not None and weight.rate is not None:
            greatest = math.exp(weight.rate - weight.power) * (weight.power / weight.rate) ** weight.power
            if greatest > WIDE_CAP:
                reason, key = f"the largest possible weight is {greatest:.3g}; {why}", f"correction.{part}.rate"
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
    """Warn about geometric bands that are so narrow that the noise of a 16-bit engine rejects short answers.

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
                "noise averages out only over long answers: with a 135 M model and a bfloat16 engine, [0.99, 1.01] "
                "kept 0.61 of the tokens in answers of 14 tokens (docs/evidence/real_model.md)."
            )
            fix = "Record some steps (offpolicy.record.dir), and set the bounds with offpolicy calibrate."
            at = f"correction.{name}.upper"
            yield run.problem(at, reason, fix, (), (name,), "NOTE", (key,))


def warn_no_staleness(run: Composed) -> Iterator[Problem]:
    """Warn about masks on pi / mu if pi is pi_old.

    In asynchronous training, pi_old / mu contains the staleness, so these masks still measure the staleness.
    """
    trainers = run.spec.proximal in ("recompute", "reuse", "same_engine")
    if not trainers or run.steps != 1 or run.asynchronous:
        return
    reason = "a batch gets one gradient step, at which pi is pi_old, so only pi_old / mu is measured."
    for name, mask in list_masks(run):
        if mask.ratio == "full":
            key, parts = f"correction.{name}.ratio", (f"{name}.staleness",)
            fix = f"Set {key}=rollout, which is the same here, or {_TWO_STEPS}."
            yield run.problem(key, reason, fix, {key: "rollout"}, parts, "NO-OP", value="full")


def warn_kl_left_out(run: Composed) -> Iterator[Problem]:
    """Warn about KL terms that are not corrected."""
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
        reason = "pi_old is mu here, so the KL in the reward also penalises the mismatch between engine and trainer."
        fix = f"Set {KL_IN_REWARD}=false and {KL_LOSS}=true, which changes training."
        yield run.problem(KL_IN_REWARD, reason, fix, _TO_KL_LOSS, ("kl_in_reward",), "NOTE", value=True)


def _explain_kl_left_out(run: Composed) -> str | None:
    """Explain why verl's own correction leaves the KL loss unchanged; None if it changes the KL loss.

    verl's weights multiply only the policy term. Its rejections change the mask, which the KL loss also reads. In
    bypass mode, however, only the policy term uses the changed mask.
    """
    if "rollout_rs" in run.active and BYPASS in run.active:
        return "verl's rollout_rs acts only on the policy term here, so rejected tokens keep the KL loss's gradient."
    if "rollout_is" in run.active:
        return "verl's rollout_is acts only on the policy term, so the KL loss is not weighted."
    return None


def warn_collapsed_rewards(run: Composed) -> Iterator[Problem]:
    """Warn about token-level rewards or discounts if the estimator sums each sequence first."""
    estimator, parts = str(run.get(ESTIMATOR)), ("dense_reward",)
    if estimator not in OUTCOME:
        return
    if run.get(KL_IN_REWARD) and run.get("algorithm.kl_ctrl.kl_coef") != 0:
        reason = f"{ESTIMATOR}={estimator} sums a row's penalties, so each token is penalised for the KL of all tokens."
        fix = f"Set {KL_IN_REWARD}=false and {KL_LOSS}=true, which changes training."
        yield run.problem(KL_IN_REWARD, reason, fix, _TO_KL_LOSS, parts, "NOTE", value=True)
    for key, reader in (("algorithm.gamma", "reinforce_plus_plus"), ("algorithm.lam", "gae")):
        by_turn = key == "algorithm.gamma" and run.get("turn_credit") is not None
        if run.get(key) not in (None, 1, 1.0) and not by_turn:
            reason = f"{ESTIMATOR}={estimator} sums each row's rewards to one outcome and applies no discount."
            fix = f"Set {key}=1.0, or {ESTIMATOR}={reader}, which changes training."
            yield run.problem(key, reason, fix, {key: 1.0}, parts, "NOTE")
