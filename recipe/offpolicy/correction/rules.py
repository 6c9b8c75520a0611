"""Rules for combining the parts of a correction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from .correction_parts import CorrectionParts
from .mask_spec import MaskSpec
from .problem import SpecError
from .proximal import BY_AGE, MU_ITSELF
from .units import overlap

KEY = "correction.centering"


def centers_mask(mask: MaskSpec) -> bool:
    """Return True if the centering term C includes the mask's decision, which then depends only on a token's own p / q.

    Example:
        >>> centers_mask(MaskSpec("rollout", "token", "product", 0.5, 2.0, "any"))
        True
    """
    entry = mask.entry
    return mask.level == "token" and entry.reduce not in ("batch", "oldest") and math.isfinite(entry.at(1.0))


def read_centering(mapping: Mapping[str, Any]) -> int | None:
    """Read centering's K from the plain values under ``correction``; None for no centering.

    Raises:
        SpecError: the value is not a number of tokens.

    Example:
        >>> read_centering({"centering": 20}), read_centering({})
        (20, None)
    """
    value = mapping.get("centering")
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise SpecError(
        "expected the number of likeliest tokens that the rollout engine returns at each position, 1 or more.",
        f"Set {KEY}=20 for example, or null for none.",
        key=KEY,
        value=value,
        proposed={KEY: 20},
    )


def check_centering(spec: CorrectionParts) -> None:
    """Refuse parts whose effect on unsampled tokens is unknown, and a centering term that is always 0.

    Raises:
        SpecError: names the part's key.

    Example:
        >>> check_centering(CorrectionParts(centering=20))
    """
    if spec.centering is None:
        return
    for key, (value, reason) in find_unknown(spec).items():
        raise SpecError(
            f"score centering needs the factor of every likely token at a position, and {reason}",
            f"Set {KEY}=null, or remove this part.",
            key=f"correction.{key}",
            value=value,
            alongside={KEY: spec.centering},
            proposed={KEY: None},
        )
    masked = any(centers_mask(mask) for _, mask in spec.masks)
    for name, weight in spec.all_weights.items():
        if weight.kind == "truncate" and weight.lower is None and weight.upper is None and not masked:
            raise SpecError(
                f"correction.{name} has no bound, and the expected score under untruncated weights is 0.",
                f"Set correction.{name}.upper=2.0 for example, or {KEY}=null.",
                key=KEY,
                value=spec.centering,
                alongside={f"correction.{name}.upper": None},
                proposed={KEY: None},
            )


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
            found[f"{name}.when"] = part.when, "C has one factor for all tokens, whatever the advantage and the turn."
        if part.by_staleness is not None:
            found[f"{name}.by_staleness"] = list(part.by_staleness), "C has one pair of bounds for all ages."
    if spec.proximal in (*MU_ITSELF, "loglinear"):
        found["proximal"] = spec.proximal, "PPO's clip of pi / mu is part of that factor."
    if spec.skyrl_compat:
        found["skyrl_compat"] = True, "its order of masks is defined only for sampled tokens."
    if spec.allow_truncated_sampling:
        found["allow_truncated_sampling"] = True, "pi and mu are normalised over different tokens."
    if spec.support is not None:
        found["support"] = spec.support, "the server returns the support, which may have fewer tokens."
    return found


_OF_MASK = ("ratio", "level", "aggregate", "when")
_OF_WEIGHT = ("ratio", "level", "aggregate", "kind")


def check_together(spec: CorrectionParts) -> None:
    """Refuse combinations of parts that count something twice, that never act, or that depend on themselves.

    Raises:
        SpecError: names the keys, their values and the fix.

    Example:
        >>> check_together(CorrectionParts(denominator="kept"))
        Traceback (most recent call last):
            ...
        recipe.offpolicy.correction.problem.SpecError: correction.denominator=kept: there is no mask: ...
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
        check_centering,
    )
    for rule in (*rules, _check_factors):
        rule(spec)


def _check_weights(spec: CorrectionParts) -> None:
    """Refuse weights if two of them would apply to the same token."""
    if spec.weight is not None and spec.weights:
        name, weight = spec.weights[0]
        raise SpecError(
            "weight applies to every token, so some tokens would be weighted twice.",
            f"Set correction.weight=null, or correction.weights={{}} and correction.weights.{name}.when on it alone.",
            key="correction.weight",
            value=spec.weight.to_mapping(),
            alongside={f"correction.weights.{name}.when": weight.when},
        )
    for (first, one), (name, other) in itertools.combinations(spec.weights, 2):
        if overlap((one.when, one.sign), (other.when, other.sign)):
            key = f"correction.weights.{name}"
            raise SpecError(
                f"a token can be weighted by both {first} and {name}, but a token can have only one weight.",
                "Give one when=negative and the other when=positive, with the same sign, or remove one of them.",
                key=f"{key}.when",
                value=other.when,
                alongside={
                    f"correction.weights.{first}.when": one.when,
                    f"correction.weights.{first}.sign": one.sign,
                    f"{key}.sign": other.sign,
                },
            )


def _check_kl(spec: CorrectionParts) -> None:
    if spec.kl_clip is not None and spec.kl_weight is not None:
        raise SpecError(
            "kl_clip already gives the KL loss a ratio, clipped on both sides.",
            "Set one of the two to null.",
            key="correction.kl_weight",
            value=spec.kl_weight.to_mapping(),
            alongside={"correction.kl_clip": spec.to_mapping()["kl_clip"]},
        )


def _check_support(spec: CorrectionParts) -> None:
    """Refuse parts that need log-probs over the whole vocabulary, and permissions without effect."""
    if spec.support is None:
        return
    alongside = {"correction.support": spec.support}
    for name in ("kl_clip", "kl_weight"):
        if getattr(spec, name) is not None:
            raise SpecError(
                "its ratio is over the support, and the KL term over the whole vocabulary.",
                f"Set correction.{name}=null, or correction.support=null.",
                key=f"correction.{name}",
                value=spec.to_mapping()[name],
                alongside=alongside,
            )
    if spec.needs_batch and spec.support_unknown == "mask":
        raise SpecError(
            "the trainer counts a batch's tokens before the worker masks those whose support is unknown.",
            "Set correction.support_unknown=full.",
            key="correction.support_unknown",
            value="mask",
            alongside=alongside | {f"correction.{name}": value for name, value in _list_of_batch(spec).items()},
            proposed={"correction.support_unknown": "full"},
        )
    if spec.allow_truncated_sampling:
        raise SpecError(
            "with the support replayed, pi_old and mu are over the same tokens, so there is nothing to allow.",
            "Set it to false.",
            key="correction.allow_truncated_sampling",
            value=True,
            alongside=alongside,
            proposed={"correction.allow_truncated_sampling": False},
        )


def _list_of_batch(spec: CorrectionParts) -> dict[str, Any]:
    """List the keys that need a constant of the whole batch, with their values."""
    found: dict[str, Any] = {f"{key}.normalize": True for key, weight in spec.all_weights.items() if weight.normalize}
    found |= {f"masks.{name}.budget": mask.budget for name, mask in spec.masks if mask.budget is not None}
    around = (("denominator", "original"), ("nonfinite", "counted"), ("baseline", "include"))
    return found | {name: getattr(spec, name) for name, usual in around if getattr(spec, name) != usual}


def _check_proximal(spec: CorrectionParts) -> None:
    if spec.proximal == "loglinear":
        if spec.alpha is None or (spec.alpha != BY_AGE and not 0 < spec.alpha < 1):
            raise SpecError(
                "expected the share of the current policy, between 0 (bypass) and 1 (reuse), or by_age.",
                "Set correction.alpha=0.5 for example.",
                key="correction.alpha",
                value=spec.alpha,
                alongside=_proximal(spec),
                proposed={"correction.alpha": 0.5},
            )
    elif spec.alpha is not None:
        raise SpecError(
            "only loglinear interpolates.",
            "Set correction.proximal=loglinear, or correction.alpha=null.",
            key="correction.alpha",
            value=spec.alpha,
            alongside=_proximal(spec),
        )
    if spec.proximal in MU_ITSELF:
        for part, weight in spec.all_weights.items():
            if weight.ratio == "rollout":
                raise SpecError(
                    "pi_old is mu, so PPO's own ratio pi / mu corrects already, and a weight would count it twice."
                    if spec.proximal == "bypass"
                    else "mu is checked to equal pi_old, so the weight is 1.",
                    f"Set correction.proximal=recompute, or correction.{part}=null."
                    if part == "weight"
                    else f"Set correction.proximal=recompute, or remove correction.{part}.",
                    key=f"correction.{part}.ratio",
                    value="rollout",
                    alongside=_proximal(spec),
                    proposed={"correction.proximal": "recompute"},
                )
        _refuse_inert(spec, "rollout", "pi_old is mu, and this ratio is 1", "full")
    if spec.proximal == "reuse":
        _refuse_inert(spec, "ppo", "pi_old is the current policy, and this ratio is 1", "full")
        if spec.penalty is not None and spec.penalty.ratio == "ppo":
            raise SpecError(
                "pi_old is the current policy, and the log of this ratio is 0.",
                "Set correction.penalty.ratio=full, or correction.proximal=recompute.",
                key="correction.penalty.ratio",
                value="ppo",
                alongside=_proximal(spec),
                proposed={"correction.penalty.ratio": "full"},
            )
        if spec.kl_clip is not None:
            raise SpecError(
                "pi / pi_old is 1, so nothing is clipped.",
                key="correction.kl_clip",
                value=spec.to_mapping()["kl_clip"],
                alongside=_proximal(spec),
                proposed={"correction.proximal": "recompute"},
            )
    if spec.proximal in ("reuse", "loglinear") and (batch_wide := _batch_level_keys(spec)):
        key, value = next(iter(batch_wide.items()))
        raise SpecError(
            "it is fixed for the batch from pi_old, which is not known before the gradient step.",
            f"Set correction.proximal=recompute, or another {key}.",
            key=key,
            value=value,
            alongside=_proximal(spec),
            proposed={"correction.proximal": "recompute"} if spec.proximal == "reuse" else None,
        )


def _proximal(spec: CorrectionParts) -> dict[str, Any]:
    return {"correction.proximal": spec.proximal}


def _refuse_inert(spec: CorrectionParts, ratio: str, why: str, instead: str) -> None:
    for name, mask in spec.masks:
        if mask.ratio == ratio and not mask.entry.of_age:
            key = f"correction.masks.{name}.ratio"
            raise SpecError(
                f"{why}, so the mask never acts.",
                f"Set {key}={instead}, or correction.proximal=recompute.",
                key=key,
                value=ratio,
                alongside=_proximal(spec),
                proposed={key: instead},
            )


def _batch_level_keys(spec: CorrectionParts) -> dict[str, Any]:
    """Collect the keys whose decision is fixed for the whole batch, with their values."""
    keys: dict[str, Any] = {}
    keys |= {f"correction.{part}.normalize": True for part, weight in spec.all_weights.items() if weight.normalize}
    keys |= {f"correction.masks.{name}.budget": mask.budget for name, mask in spec.masks if mask.budget is not None}
    if spec.denominator == "kept":
        keys["correction.denominator"] = "kept"
    if spec.baseline == "exclude":
        keys["correction.baseline"] = "exclude"
    return keys


def _find_step_rejection(spec: CorrectionParts) -> str | None:
    """Return the key of the first part that can drop tokens based on the current policy or the advantages."""
    weights = spec.all_weights
    return next((part for part in spec.step_parts if part not in weights or weights[part].kind == "reject"), None)


def _check_denominator(spec: CorrectionParts) -> None:
    if spec.denominator == "original":
        return
    if late := _find_step_rejection(spec):
        raise SpecError(
            f"correction.{late} is decided at each gradient step, so the count would change within a mini-batch.",
            key="correction.denominator",
            value="kept",
            proposed={"correction.denominator": "original"},
        )
    if not spec.rollout_rejects:
        raise SpecError(
            "there is no mask: nothing is rejected, so both counts are equal.",
            "Set correction.denominator=original, or add a mask.",
            key="correction.denominator",
            value="kept",
            proposed={"correction.denominator": "original"},
        )


def _check_nonfinite(spec: CorrectionParts) -> None:
    if spec.nonfinite == "counted":
        return
    reason, alongside = "", {}
    if spec.denominator == "kept":
        reason = "kept counts only kept tokens, so it already excludes tokens whose mu is not finite."
        alongside = {"correction.denominator": "kept"}
    elif not spec.reads_mu:
        reason = (
            "nothing in the correction reads mu, so tokens whose mu is not finite keep their gradient and are counted."
        )
    if reason:
        raise SpecError(
            reason,
            key="correction.nonfinite",
            value="excluded",
            alongside=alongside,
            proposed={"correction.nonfinite": "counted"},
        )


def _check_baseline(spec: CorrectionParts) -> None:
    if spec.baseline == "include":
        return
    if late := _find_step_rejection(spec):
        raise SpecError(
            f"circular: correction.{late} rejects only once the advantages are known, but the advantages depend "
            "on the baseline.",
            key="correction.baseline",
            value="exclude",
            proposed={"correction.baseline": "include"},
        )
    levels = {mask.level for _, mask in spec.masks}
    levels |= {weight.level for weight in spec.all_weights.values() if weight.kind == "reject"}
    if not levels - {"token", "prefix"}:
        raise SpecError(
            "nothing rejects rows, so no sibling would be left out.",
            "Set correction.baseline=include, or add a mask by sequence.",
            key="correction.baseline",
            value="exclude",
            proposed={"correction.baseline": "include"},
        )


def _check_skyrl(spec: CorrectionParts) -> None:
    if not spec.skyrl_compat:
        return
    for name, mask in spec.masks:
        known = mask.level in ("token", "sequence") and mask.aggregate in ("any", "product", "geometric")
        if mask.needs_step or not known:
            plain = {key: value for key, value in mask.to_mapping().items() if key in _OF_MASK}
            _refuse_skyrl(f"correction.masks.{name}", plain, "mask")
    for part, weight in spec.all_weights.items():
        known = weight.level in ("token", "sequence") and weight.aggregate == "product" and weight.kind != "reject"
        if weight.needs_step or not known:
            plain = {key: value for key, value in weight.to_mapping().items() if key in _OF_WEIGHT}
            _refuse_skyrl(f"correction.{part}", plain, "weight")
    if spec.needs_batch and _batch_level_keys(spec):
        key, value = next(iter(_batch_level_keys(spec).items()))
        _refuse_skyrl(key, value, "key")


def _check_factors(spec: CorrectionParts) -> None:
    """Refuse age-dependent bounds if another bound always acts first and has the same width at every age."""
    for name, part in spec.age_parts.items():
        if part.by_staleness is None:
            continue
        key, value = f"correction.{name}.by_staleness", list(part.by_staleness)
        if spec.skyrl_compat:
            _refuse_skyrl(key, value, "key")
        if spec.proximal == "bypass":
            raise SpecError(
                "pi_old is mu, so the base loss clips pi / mu, including staleness, at the same width for every age, "
                "and a bound that widens with age is never reached.",
                f"Set correction.proximal=recompute, or {key}=null.",
                key=key,
                value=value,
                alongside=_proximal(spec),
                proposed={"correction.proximal": "recompute"},
            )


def _refuse_skyrl(key: str, value: Any, kind: str) -> None:
    raise SpecError(
        f"SkyRL has no such {kind}, so its order is undefined.",
        key="correction.skyrl_compat",
        value=True,
        alongside={key: value},
        proposed={"correction.skyrl_compat": False},
    )
