"""Which parts of a correction cannot go together, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .validation import SpecError

if TYPE_CHECKING:
    from .spec import CorrectionSpec


def check_together(spec: CorrectionSpec) -> None:
    """Parts that would count something twice, never act, or depend on themselves.

    Raises:
        SpecError: names the keys, their values and the fix.
    """
    for rule in (_proximal_fits, _denominator_fits, _baseline_fits, _skyrl_fits):
        rule(spec)


def _proximal_fits(spec: CorrectionSpec) -> None:
    if spec.proximal == "loglinear":
        if spec.alpha is None or not 0 < spec.alpha < 1:
            raise SpecError(
                f"correction.alpha={spec.alpha} with correction.proximal=loglinear: the share of the current policy, "
                f"between 0 (bypass) and 1 (reuse). Set correction.alpha=0.5 for example."
            )
    elif spec.alpha is not None:
        raise SpecError(
            f"correction.alpha={spec.alpha} with correction.proximal={spec.proximal}: only loglinear interpolates. "
            f"Set correction.proximal=loglinear, or correction.alpha=null."
        )
    if spec.proximal == "bypass":
        if spec.weight is not None and spec.weight.ratio == "rollout":
            raise SpecError(
                "correction.weight.ratio=rollout with correction.proximal=bypass: pi_old is mu, so that PPO's own "
                "ratio pi / mu corrects already and a weight would count it twice. Set correction.weight=null or "
                "correction.proximal=recompute."
            )
        _inert(spec, "rollout", "pi_old is mu, and this ratio is 1", "full")
    if spec.proximal == "reuse":
        _inert(spec, "ppo", "pi_old is the current policy, and this ratio is 1", "full")
        if spec.kl_clip is not None:
            raise SpecError(
                "correction.kl_clip with correction.proximal=reuse: pi / pi_old is 1, so that nothing is clipped. "
                "Set correction.kl_clip=null."
            )
    if spec.proximal in ("reuse", "loglinear"):
        needs = [key for key, needed in _batch_wide(spec).items() if needed]
        if needs:
            raise SpecError(
                f"{needs[0]} with correction.proximal={spec.proximal}: it is fixed for the batch from pi_old, which is "
                f"not known before the gradient step. Set correction.proximal=recompute."
            )


def _inert(spec: CorrectionSpec, ratio: str, why: str, instead: str) -> None:
    for name, mask in spec.masks:
        if mask.ratio == ratio:
            raise SpecError(
                f"correction.masks.{name}.ratio={ratio} with correction.proximal={spec.proximal}: {why}, so that the "
                f"mask never acts. Set correction.masks.{name}.ratio={instead}, or correction.proximal=recompute."
            )


def _batch_wide(spec: CorrectionSpec) -> dict[str, bool]:
    return {
        "correction.weight.normalize=true": spec.weight is not None and spec.weight.normalize,
        **{f"correction.masks.{name}.budget={m.budget}": m.budget is not None for name, m in spec.masks},
        "correction.denominator=kept": spec.denominator == "kept",
        "correction.baseline=exclude": spec.baseline == "exclude",
    }


def _step_rejects(spec: CorrectionSpec) -> str | None:
    """Key of the first part that can drop tokens by the current policy or the advantages."""
    weighs = spec.weight is not None and spec.weight.kind != "reject"
    return next((part for part in spec.step_parts if part != "weight" or not weighs), None)


def _denominator_fits(spec: CorrectionSpec) -> None:
    if spec.denominator == "original":
        return
    if late := _step_rejects(spec):
        raise SpecError(
            f"correction.denominator=kept with correction.{late}: it waits for the current policy or the "
            f"advantages, so that the count would change within a mini-batch. Set correction.denominator=original."
        )
    if not spec.rollout_rejects:
        raise SpecError(
            "correction.denominator=kept with no mask: nothing is rejected, so that both counts are one. "
            "Set correction.denominator=original, or add a mask."
        )


def _baseline_fits(spec: CorrectionSpec) -> None:
    if spec.baseline == "include":
        return
    if late := _step_rejects(spec):
        raise SpecError(
            f"correction.baseline=exclude with correction.{late}: circular, for what is rejected depends "
            f"on the current policy or on the very advantages that the baseline makes. Set correction.baseline=include."
        )
    levels = {mask.level for _, mask in spec.masks}
    if spec.weight is not None and spec.weight.kind == "reject":
        levels.add(spec.weight.level)
    if not levels - {"token"}:
        raise SpecError(
            "correction.baseline=exclude with nothing that rejects rows: no sibling would be left out. "
            "Set correction.baseline=include, or add a mask by sequence."
        )


def _skyrl_fits(spec: CorrectionSpec) -> None:
    if not spec.skyrl_compat:
        return
    for name, mask in spec.masks:
        known = mask.level in ("token", "sequence") and mask.aggregate in ("any", "product", "geometric")
        if mask.needs_step or not known:
            raise SpecError(
                f"correction.skyrl_compat=true with correction.masks.{name} (ratio {mask.ratio}, level {mask.level}, "
                f"aggregate {mask.aggregate}, when {mask.when}): SkyRL has no such mask, so that its order is not "
                f"defined. Set correction.skyrl_compat=false."
            )
    weight = spec.weight
    if weight is not None and (
        weight.needs_step
        or weight.kind == "reject"
        or weight.level not in ("token", "sequence")
        or weight.aggregate != "product"
    ):
        raise SpecError(
            f"correction.skyrl_compat=true with correction.weight (ratio {weight.ratio}, level {weight.level}, "
            f"aggregate {weight.aggregate}, kind {weight.kind}): SkyRL has no such weight, so that its order is not "
            f"defined. Set correction.skyrl_compat=false."
        )
    if spec.needs_batch:
        key = next(key for key, needed in _batch_wide(spec).items() if needed)
        raise SpecError(
            f"correction.skyrl_compat=true with {key}: SkyRL has no such thing. Set correction.skyrl_compat=false."
        )
