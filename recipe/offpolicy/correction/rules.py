"""Rules for combining the parts of a correction."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

from .correction_parts import BY_AGE, MU_ITSELF, CorrectionParts
from .masks import MaskSpec
from .problem import SpecError
from .units import Sign, When

_error = partial(SpecError.under, "correction")


def check_together(spec: CorrectionParts) -> None:
    """Reject combinations of parts that count a ratio twice, that have no effect, or that are circular.

    Raises:
        SpecError: names the keys, their values and the fix.

    Example:
        >>> check_together(CorrectionParts(denominator="kept"))
        Traceback (most recent call last):
            ...
        recipe.offpolicy.correction.problem.SpecError: correction.denominator=kept: there is no mask, ...
    """
    rules = (
        _check_weights,
        _check_kl,
        _check_support,
        _check_proximal,
        _check_denominator,
        _check_nonfinite,
        _check_baseline,
        _check_skyrl,
        _check_centering,
        _check_factors,
    )
    for rule in rules:
        rule(spec)


def _check_weights(spec: CorrectionParts) -> None:
    """Reject weights if two of them would apply to the same token."""
    if spec.weight is not None and spec.weights:
        name, weight = spec.weights[0]
        raise _error(
            "weight",
            spec.weight.to_mapping(),
            "weight applies to every token, so some tokens would be weighted twice.",
            "Set correction.weight=null, or correction.weights={} to keep only correction.weight.",
            alongside={f"weights.{name}.when": weight.when},
        )
    for (first, one), (name, other) in itertools.combinations(spec.weights, 2):
        if overlap((one.when, one.sign), (other.when, other.sign)):
            whens = {f"weights.{first}.when": one.when, f"weights.{first}.sign": one.sign}
            raise _error(
                f"weights.{name}.when",
                other.when,
                f"a token can be weighted by both {first} and {name}, but a token can have only one weight.",
                "Set when=negative for one and when=positive for the other, with the same sign, or remove one of them.",
                alongside=whens | {f"weights.{name}.sign": other.sign},
            )


def overlap(one: tuple[When, Sign], other: tuple[When, Sign]) -> bool:
    """Return True if a token can be selected by both of the pairs (``when``, ``sign``).

    Example:
        >>> overlap(("negative", "row"), ("positive", "row")), overlap(("negative", "row"), ("positive", "token"))
        (False, True)
    """
    (when, sign), (other_when, other_sign) = one, other
    whens = {when, other_when}
    return bool(whens & {"any", "post_tool"}) or len(whens) == 1 or sign != other_sign


def _check_kl(spec: CorrectionParts) -> None:
    if spec.kl_clip is not None and spec.kl_weight is not None:
        plain = spec.to_mapping()
        reason, fix = "kl_clip already gives the KL loss a clipped ratio.", "Set one of the two to null."
        raise _error("kl_weight", plain["kl_weight"], reason, fix, alongside={"kl_clip": plain["kl_clip"]})


def _check_support(spec: CorrectionParts) -> None:
    """If the support is replayed, reject parts that need the whole vocabulary, and options without effect."""
    if spec.support is None:
        return
    alongside: dict[str, Any] = {"support": spec.support}
    for name in ("kl_clip", "kl_weight"):
        if (value := spec.to_mapping().get(name)) is not None:
            reason = "its ratio covers the support, whereas the KL term covers the whole vocabulary."
            fix = f"Set correction.{name}=null, or correction.support=null."
            raise _error(name, value, reason, fix, alongside=alongside)
    if spec.needs_batch and spec.support_unknown == "mask":
        excluded = {"nonfinite": spec.nonfinite} if spec.nonfinite == "excluded" else {}
        raise _error(
            "support_unknown",
            "mask",
            "the trainer counts a batch's tokens before the worker masks those whose support is unknown.",
            alongside=alongside | _list_batch_keys(spec) | excluded,
            proposed={"support_unknown": "full"},
        )
    if spec.allow_truncated_sampling:
        reason = (
            "if the support is replayed, pi_old and mu are normalised over the same tokens, so there is nothing to "
            "allow."
        )
        proposed = {"allow_truncated_sampling": False}
        raise _error("allow_truncated_sampling", True, reason, alongside=alongside, proposed=proposed)


def _list_batch_keys(spec: CorrectionParts) -> dict[str, Any]:
    """List the keys that need a value computed from pi_old over the whole batch, with their settings."""
    keys: dict[str, Any] = {f"{part}.normalize": True for part, weight in spec.all_weights.items() if weight.normalize}
    keys |= {f"masks.{name}.budget": mask.budget for name, mask in spec.masks if mask.budget is not None}
    around = {"denominator": "kept", "baseline": "exclude"}
    return keys | {name: value for name, value in around.items() if getattr(spec, name) == value}


def _check_proximal(spec: CorrectionParts) -> None:
    alongside = {"proximal": spec.proximal}
    recompute = {"proximal": "recompute"}
    if spec.proximal != "loglinear" and spec.alpha is not None:
        fix = "Set correction.proximal=loglinear, or correction.alpha=null."
        raise _error("alpha", spec.alpha, "only loglinear interpolates.", fix, alongside=alongside)
    if spec.proximal == "loglinear" and (spec.alpha is None or (spec.alpha != BY_AGE and not 0 < spec.alpha < 1)):
        reason = "expected the share of the current policy, between 0 (bypass) and 1 (reuse), or by_age."
        raise _error("alpha", spec.alpha, reason, alongside=alongside, proposed={"alpha": 0.5})
    if spec.proximal in MU_ITSELF:
        for part, weight in spec.all_weights.items():
            if weight.ratio == "rollout":
                raise _error(
                    f"{part}.ratio",
                    "rollout",
                    "pi_old is mu, so PPO's own ratio pi / mu already corrects, and a weight would count the ratio "
                    "twice."
                    if spec.proximal == "bypass"
                    else "mu is checked to equal pi_old, so the weight is 1.",
                    "Set correction.proximal=recompute, or "
                    + (f"correction.{part}=null." if part == "weight" else f"remove correction.{part}."),
                    alongside=alongside,
                    proposed=recompute,
                )
        _refuse_inert(spec, "rollout", "pi_old is mu, and this ratio is 1")
    if spec.proximal == "reuse":
        _refuse_inert(spec, "ppo", "pi_old is the current policy, and this ratio is 1")
        if spec.penalty is not None and spec.penalty.ratio == "ppo":
            reason = "pi_old is the current policy, and the log of this ratio is 0."
            fix = "Set correction.penalty.ratio=full, or correction.proximal=recompute."
            full = {"penalty.ratio": "full"}
            raise _error("penalty.ratio", "ppo", reason, fix, alongside=alongside, proposed=full)
        if spec.kl_clip is not None:
            reason, clip = "pi / pi_old is 1, so nothing is clipped.", spec.to_mapping()["kl_clip"]
            raise _error("kl_clip", clip, reason, alongside=alongside, proposed=recompute)
    if spec.proximal in ("reuse", "loglinear"):
        for key, value in _list_batch_keys(spec).items():
            reason = "its value is computed once per batch from pi_old, but pi_old is unknown before the gradient step."
            fix = f"Set correction.proximal=recompute, or another correction.{key}."
            proposed = recompute if spec.proximal == "reuse" else None
            raise _error(key, value, reason, fix, alongside=alongside, proposed=proposed)


def _refuse_inert(spec: CorrectionParts, ratio: str, why: str) -> None:
    for name, mask in spec.masks:
        if mask.ratio == ratio and not mask.entry.of_age:
            key, reason = f"masks.{name}.ratio", f"{why}, so the mask has no effect."
            fix = f"Set correction.{key}=full, or correction.proximal=recompute."
            raise _error(key, ratio, reason, fix, alongside={"proximal": spec.proximal}, proposed={key: "full"})


def _find_step_rejection(spec: CorrectionParts) -> str | None:
    """Return the key of the first part that can drop tokens based on the current policy or the advantages."""
    weights = spec.all_weights
    return next((part for part in spec.step_parts if part not in weights or weights[part].kind == "reject"), None)


def _check_denominator(spec: CorrectionParts) -> None:
    if spec.denominator == "original":
        return
    reason = fix = ""
    if late := _find_step_rejection(spec):
        reason = f"correction.{late} is decided at each gradient step, so the count would change within a mini-batch."
    elif not spec.rollout_rejects:
        reason = "there is no mask, so nothing is rejected and both counts are equal."
        fix = "Set correction.denominator=original, or add a mask."
    if reason:
        raise _error("denominator", "kept", reason, fix, proposed={"denominator": "original"})


def _check_nonfinite(spec: CorrectionParts) -> None:
    if spec.nonfinite == "counted":
        return
    reason, alongside = "", {}
    if spec.denominator == "kept":
        reason = "kept counts only kept tokens, so it already excludes tokens whose mu is not finite."
        alongside = {"denominator": "kept"}
    elif not spec.reads_mu:
        reason = (
            "no part of the correction reads mu, so tokens whose mu is not finite keep their gradient and are counted."
        )
    if reason:
        raise _error("nonfinite", "excluded", reason, alongside=alongside, proposed={"nonfinite": "counted"})


def _check_baseline(spec: CorrectionParts) -> None:
    if spec.baseline == "include":
        return
    levels = {mask.level for _, mask in spec.masks}
    levels |= {weight.level for weight in spec.all_weights.values() if weight.kind == "reject"}
    reason = fix = ""
    if late := _find_step_rejection(spec):
        reason = (
            f"circular: correction.{late} rejects only once the advantages are known, but the advantages depend "
            "on the baseline."
        )
    elif not levels - {"token", "prefix"}:
        reason = "no part rejects rows, so no sibling would be left out."
        fix = "Set correction.baseline=include, or add a sequence-level mask."
    if reason:
        raise _error("baseline", "exclude", reason, fix, proposed={"baseline": "include"})


def _check_skyrl(spec: CorrectionParts) -> None:
    if not spec.skyrl_compat:
        return
    for name, mask in spec.masks:
        known = mask.level in ("token", "sequence") and mask.aggregate in ("any", "product", "geometric")
        if mask.needs_step or not known:
            shown = {key: getattr(mask, key) for key in ("ratio", "level", "aggregate", "when")}
            _refuse_skyrl(f"masks.{name}", shown, "mask")
    for part, weight in spec.all_weights.items():
        known = weight.level in ("token", "sequence") and weight.aggregate == "product" and weight.kind != "reject"
        if weight.needs_step or not known:
            shown = {key: getattr(weight, key) for key in ("level", "kind", "aggregate", "ratio")}
            _refuse_skyrl(part, shown, "weight")
    for key, value in _list_batch_keys(spec).items():
        _refuse_skyrl(key, value, "key")


def _refuse_skyrl(key: str, value: Any, kind: str) -> None:
    reason = f"SkyRL has no such {kind}, so its order is undefined."
    raise _error("skyrl_compat", True, reason, alongside={key: value}, proposed={"skyrl_compat": False})


def _check_factors(spec: CorrectionParts) -> None:
    """Reject age-dependent bounds if a tighter bound with the same width at every age always applies first."""
    for name, part in spec.age_parts.items():
        if part.by_staleness is None:
            continue
        key, value = f"{name}.by_staleness", list(part.by_staleness)
        if spec.skyrl_compat:
            _refuse_skyrl(key, value, "key")
        if spec.proximal == "bypass":
            raise _error(
                key,
                value,
                "pi_old is mu, so the base loss clips pi / mu at the same bounds for every age, and bounds that "
                "widen with age have no effect.",
                f"Set correction.proximal=recompute, or correction.{key}=null.",
                alongside={"proximal": spec.proximal},
                proposed={"proximal": "recompute"},
            )


def _check_centering(spec: CorrectionParts) -> None:
    """Reject parts whose effect on unsampled tokens is unknown, and a centering term that is always 0."""
    if spec.centering is None:
        return
    off = {"centering": None}
    for key, (value, reason) in find_unknown(spec).items():
        why = f"score centering needs the factor of every likely token at a position, and {reason}"
        fix, alongside = "Set correction.centering=null, or remove this part.", {"centering": spec.centering}
        raise _error(key, value, why, fix, alongside=alongside, proposed=off)
    masked = any(centers_mask(mask) for _, mask in spec.masks)
    for name, weight in spec.all_weights.items():
        if weight.kind == "truncate" and weight.lower is None and weight.upper is None and not masked:
            reason = f"correction.{name} has no bound, and the expected score under untruncated weights is 0."
            fix = f"Set correction.{name}.upper=2.0 for example, or correction.centering=null."
            open_side = {f"{name}.upper": None}
            raise _error("centering", spec.centering, reason, fix, alongside=open_side, proposed=off)


def centers_mask(mask: MaskSpec) -> bool:
    """Return True if the centering term C includes the mask's decision, which then depends only on a token's own p / q.

    Example:
        >>> centers_mask(MaskSpec("rollout", "token", "product", 0.5, 2.0, "any"))
        True
    """
    entry = mask.entry
    return mask.level == "token" and entry.reduce not in ("batch", "oldest") and math.isfinite(entry.at(1.0))


def find_unknown(spec: CorrectionParts) -> dict[str, tuple[Any, str]]:
    """Find the parts whose effect on unsampled tokens is unknown: key under ``correction`` -> (value, reason).

    Example:
        >>> find_unknown(CorrectionParts(support="engine"))
        {'support': ('engine', 'the server returns the support, which may have fewer tokens.')}
    """
    found: dict[str, tuple[Any, str]] = {}
    for name, weight in spec.all_weights.items():
        if weight.level != "token":
            found[f"{name}.level"] = weight.level, "a weight shared by several tokens depends on the sampled tokens."
        if weight.normalize:
            found[f"{name}.normalize"] = True, "the mean weight is known only for sampled tokens."
    for name, mask in spec.masks:
        if mask.level != "token" or mask.entry.of_age:
            continue
        if mask.ratio == "ppo":
            found[f"masks.{name}.ratio"] = "ppo", "pi_old is known only for sampled tokens."
        elif not centers_mask(mask):
            found[f"masks.{name}.aggregate"] = mask.aggregate, "this aggregate cannot be computed from a ratio alone."
    by_token = spec.all_weights | {f"masks.{name}": mask for name, mask in spec.masks if centers_mask(mask)}
    for name, part in by_token.items():
        if part.when != "any":
            found[f"{name}.when"] = part.when, "C has one factor for all tokens, regardless of advantage and turn."
        if part.by_staleness is not None:
            found[f"{name}.by_staleness"] = list(part.by_staleness), "C has one pair of bounds for all ages."
    around = {
        "proximal": (spec.proximal in (*MU_ITSELF, "loglinear"), "PPO's clip of pi / mu is part of that factor."),
        "skyrl_compat": (spec.skyrl_compat, "its order of masks is defined only for sampled tokens."),
        "allow_truncated_sampling": (spec.allow_truncated_sampling, "pi and mu are normalised over different tokens."),
        "support": (spec.support is not None, "the server returns the support, which may have fewer tokens."),
    }
    return found | {name: (getattr(spec, name), reason) for name, (set_, reason) in around.items() if set_}
