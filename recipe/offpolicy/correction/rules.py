"""Rules on which parts of a correction can be combined."""

from __future__ import annotations

from typing import Any

from .correction_parts import CorrectionParts
from .problem import SpecError

_OF_MASK = ("ratio", "level", "aggregate", "when")
_OF_WEIGHT = ("ratio", "level", "aggregate", "kind")


def check_together(spec: CorrectionParts) -> None:
    """Check that no parts count something twice, never act, or depend on themselves.

    Raises:
        SpecError: names the keys, their values and the fix.

    Example:
        >>> check_together(CorrectionParts(denominator="kept"))
        Traceback (most recent call last):
            ...
        recipe.offpolicy.correction.problem.SpecError: correction.denominator=kept: there is no mask: ...
    """
    for rule in (_check_proximal, _check_denominator, _check_baseline, _check_skyrl, _check_factors):
        rule(spec)


def _check_proximal(spec: CorrectionParts) -> None:
    if spec.proximal == "loglinear":
        if spec.alpha is None or not 0 < spec.alpha < 1:
            raise SpecError(
                "the share of the current policy, between 0 (bypass) and 1 (reuse).",
                "Set correction.alpha=0.5 for example.",
                key="correction.alpha",
                value=spec.alpha,
                beside=_proximal(spec),
                mend={"correction.alpha": 0.5},
            )
    elif spec.alpha is not None:
        raise SpecError(
            "only loglinear interpolates.",
            "Set correction.proximal=loglinear, or correction.alpha=null.",
            key="correction.alpha",
            value=spec.alpha,
            beside=_proximal(spec),
            mend={"correction.alpha": None},
        )
    if spec.proximal == "bypass":
        if spec.weight is not None and spec.weight.ratio == "rollout":
            raise SpecError(
                "pi_old is mu, so that PPO's own ratio pi / mu corrects already and a weight would count it twice.",
                "Set correction.proximal=recompute, or correction.weight=null.",
                key="correction.weight.ratio",
                value="rollout",
                beside=_proximal(spec),
                mend={"correction.proximal": "recompute"},
            )
        _refuse_inert(spec, "rollout", "pi_old is mu, and this ratio is 1", "full")
    if spec.proximal == "reuse":
        _refuse_inert(spec, "ppo", "pi_old is the current policy, and this ratio is 1", "full")
        if spec.kl_clip is not None:
            raise SpecError(
                "pi / pi_old is 1, so that nothing is clipped.",
                key="correction.kl_clip",
                value=spec.to_mapping()["kl_clip"],
                beside=_proximal(spec),
                mend={"correction.kl_clip": None},
            )
    if spec.proximal in ("reuse", "loglinear") and (batch_wide := _batch_level_keys(spec)):
        key, value = next(iter(batch_wide.items()))
        raise SpecError(
            "it is fixed for the batch from pi_old, which is not known before the gradient step.",
            key=key,
            value=value,
            beside=_proximal(spec),
            mend={"correction.proximal": "recompute", "correction.alpha": None},
        )


def _proximal(spec: CorrectionParts) -> dict[str, Any]:
    return {"correction.proximal": spec.proximal}


def _refuse_inert(spec: CorrectionParts, ratio: str, why: str, instead: str) -> None:
    for name, mask in spec.masks:
        if mask.ratio == ratio and not mask.entry.of_age:
            key = f"correction.masks.{name}.ratio"
            raise SpecError(
                f"{why}, so that the mask never acts.",
                f"Set {key}={instead}, or correction.proximal=recompute.",
                key=key,
                value=ratio,
                beside=_proximal(spec),
                mend={key: instead},
            )


def _batch_level_keys(spec: CorrectionParts) -> dict[str, Any]:
    """Collect the keys that are fixed for the whole batch, with their values."""
    keys: dict[str, Any] = {}
    if spec.weight is not None and spec.weight.normalize:
        keys["correction.weight.normalize"] = True
    keys |= {f"correction.masks.{name}.budget": mask.budget for name, mask in spec.masks if mask.budget is not None}
    if spec.denominator == "kept":
        keys["correction.denominator"] = "kept"
    if spec.baseline == "exclude":
        keys["correction.baseline"] = "exclude"
    return keys


def _find_step_rejection(spec: CorrectionParts) -> str | None:
    """Return the key of the first part that can drop tokens by the current policy or the advantages."""
    weighs = spec.weight is not None and spec.weight.kind != "reject"
    return next((part for part in spec.step_parts if part != "weight" or not weighs), None)


def _check_denominator(spec: CorrectionParts) -> None:
    if spec.denominator == "original":
        return
    if late := _find_step_rejection(spec):
        raise SpecError(
            f"correction.{late} waits for the current policy or the advantages, so that the count would change within "
            f"a mini-batch.",
            key="correction.denominator",
            value="kept",
            mend={"correction.denominator": "original"},
        )
    if not spec.rollout_rejects:
        raise SpecError(
            "there is no mask: nothing is rejected, so that both counts are one.",
            "Set correction.denominator=original, or add a mask.",
            key="correction.denominator",
            value="kept",
            mend={"correction.denominator": "original"},
        )


def _check_baseline(spec: CorrectionParts) -> None:
    if spec.baseline == "include":
        return
    if late := _find_step_rejection(spec):
        raise SpecError(
            f"circular: what correction.{late} rejects depends on the current policy or on the very advantages that "
            f"the baseline makes.",
            key="correction.baseline",
            value="exclude",
            mend={"correction.baseline": "include"},
        )
    levels = {mask.level for _, mask in spec.masks}
    if spec.weight is not None and spec.weight.kind == "reject":
        levels.add(spec.weight.level)
    if not levels - {"token"}:
        raise SpecError(
            "nothing rejects rows: no sibling would be left out.",
            "Set correction.baseline=include, or add a mask by sequence.",
            key="correction.baseline",
            value="exclude",
            mend={"correction.baseline": "include"},
        )


def _check_skyrl(spec: CorrectionParts) -> None:
    if not spec.skyrl_compat:
        return
    for name, mask in spec.masks:
        known = mask.level in ("token", "sequence") and mask.aggregate in ("any", "product", "geometric")
        if mask.needs_step or not known:
            plain = {key: value for key, value in mask.to_mapping().items() if key in _OF_MASK}
            _refuse_skyrl(f"correction.masks.{name}", plain, "mask")
    weight = spec.weight
    if weight is not None and (
        weight.needs_step
        or weight.kind == "reject"
        or weight.level not in ("token", "sequence")
        or weight.aggregate != "product"
    ):
        plain = {key: value for key, value in weight.to_mapping().items() if key in _OF_WEIGHT}
        _refuse_skyrl("correction.weight", plain, "weight")
    if spec.needs_batch:
        key, value = next(iter(_batch_level_keys(spec).items()))
        _refuse_skyrl(key, value, "key")


def _check_factors(spec: CorrectionParts) -> None:
    """Refuse bounds by age where another bound, of one width, stands in their place."""
    for name, part in spec.age_parts.items():
        if part.by_staleness is None:
            continue
        key, value = f"correction.{name}.by_staleness", list(part.by_staleness)
        if spec.skyrl_compat:
            _refuse_skyrl(key, value, "key")
        if spec.proximal == "bypass":
            raise SpecError(
                "pi_old is mu, so that the base loss clips pi / mu, staleness included, at one width for every age, "
                "and a bound that widens with it is never reached.",
                f"Set correction.proximal=recompute, or {key}=null.",
                key=key,
                value=value,
                beside=_proximal(spec),
                mend={key: None},
            )


def _refuse_skyrl(key: str, value: Any, kind: str) -> None:
    raise SpecError(
        f"SkyRL has no such {kind}, so that its order is not defined.",
        key="correction.skyrl_compat",
        value=True,
        beside={key: value},
        mend={"correction.skyrl_compat": False},
    )
