"""What is wrong with ``offpolicy.calibrate.target_ess``, by itself and beside a correction."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ...correction import CorrectionSpec, Problem
from ...correction.problem import set_to

KEY = "offpolicy.calibrate.target_ess"


def malformed(target: Any) -> Iterator[Problem]:
    """A value that is neither null nor a number in (0, 1)."""
    number = isinstance(target, int | float) and not isinstance(target, bool)
    if target is not None and not (number and 0 < target < 1):
        reason = "an effective sample size as a share of the weights, above 0 and below 1."
        yield Problem(KEY, target, reason, "Set 0.9, or null.", parts=(), overrides=(set_to(KEY, 0.9),))


def misplaced(target: float, spec: CorrectionSpec, masks: Collection[str]) -> Iterator[Problem]:
    """A weight of ``spec`` whose cap cannot follow an ESS.

    ``normalize`` is none of it: it divides all weights by one number, after the cap, which leaves the ESS as it is.

    Args:
        masks: names of the masks whose bounds move.
    """
    for reason, fix in _reasons(spec, masks):
        sentence = f"Set {KEY}=null, or {fix}."
        yield Problem(KEY, target, reason, sentence, parts=(), overrides=(set_to(KEY, None),))


def _reasons(spec: CorrectionSpec, masks: Collection[str]) -> Iterator[tuple[str, str]]:
    """What is in the way, and what would clear it."""
    weight = spec.weight
    if weight is None:
        yield (
            "correction.weight=null: there is no cap that could move.",
            "stack a weight that truncates, such as correction=[tis_token,gsm]",
        )
        return
    if weight.kind == "reject":
        yield (
            "correction.weight.kind=reject drops what lies beyond its bounds, and has no cap.",
            "correction.weight.kind=truncate",
        )
    elif weight.upper is None:
        yield "correction.weight.upper=null: there is no cap that could move.", "give correction.weight.upper"
    elif weight.upper <= 1:
        yield (
            f"correction.weight.upper={weight.upper:g}: a cap moves by factors of its distance from 1, and lies above.",
            "correction.weight.upper=2.0",
        )
    if weight.kind != "reject" and weight.lower is not None and weight.lower >= 1:
        yield (
            f"correction.weight.lower={weight.lower:g}: the cap comes near to 1, and would cross it.",
            "correction.weight.lower=0.5",
        )
    if spec.skyrl_compat and weight.level != "token":
        yield (
            f"correction.skyrl_compat=true lets masks decide what a weight of level {weight.level} sees.",
            "correction.skyrl_compat=false",
        )
    if "weight" in masks:
        yield (
            "the bounds of correction.masks.weight move too, and both would be offpolicy/calibrate/weight.",
            "rename the mask",
        )
