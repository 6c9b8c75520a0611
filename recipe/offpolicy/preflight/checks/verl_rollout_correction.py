"""Checks of verl's own correction: beside ours, in keys that nothing reads, and with inverted thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import DictConfig

from verl_patches.execution_path import live_path

from ...correction import CorrectionSpec, SpecError
from ...correction.dialects.verl import VERL_DEFAULTS, read_verl_rejections, read_verl_weight_bounds
from ...correction.problem import Problem, set_to
from ...extensions.registry import list_registered
from ..verl_keys import find_dead_keys as dead_keys_of
from ..verl_keys.keys import VERL, find_changed_keys, list_active, name_part, read_rollout_correction
from ..verl_keys.misplaced import check_misplaced

_LOPSIDED = 0.1
"""Share of the width of a band, in nats, by which its middle may be off 1."""
_RS, _IS = f"{VERL}.rollout_rs_threshold", f"{VERL}.rollout_is_threshold"


def check_not_both(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Refuse verl's own correction beside ours; what ours does already is dropped, and its cap moved to ours."""
    if spec.is_none:
        return
    twice = "verl's own correction beside ours would correct twice."
    reason = twice if list_active(config) else "verl's own correction, which is off, would read it, and ours does not."
    for key, value in find_changed_keys(config).items():
        known = key in VERL_DEFAULTS
        if known and value is None:
            continue  # asks for nothing
        name, weight = f"{VERL}.{key}", spec.weight
        overrides: tuple[str, ...] = ()
        back = set_to(name, VERL_DEFAULTS[key]) if known else f"~{name}"
        fix = f"Choose: {back} trains by ours alone, and correction=none by verl's alone."
        if weight is not None and weight.kind == "truncate" and weight.ratio == "rollout":
            plain = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            if key == "rollout_is" and value == weight.level:
                fix, overrides = f"correction.weight does this already: set {back}, or correction=none.", (back,)
            elif key == "rollout_is_threshold" and plain and weight.upper is not None:
                upper = set_to("correction.weight.upper", value)
                fix, overrides = f"Set {upper} instead, or correction=none.", (back, upper)
        yield Problem(name, value, reason, fix, overrides=overrides)


def check_dead_keys(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find keys of verl's own correction that nothing reads, on this path or where they stand."""
    yield from dead_keys_of(config, spec, live_path(config))
    yield from check_misplaced(config, spec, {"hydra", *list_registered(config)})


def check_thresholds(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check thresholds of verl's own correction that verl misreads, or ends the run over."""
    if not spec.is_none:
        return
    values = read_rollout_correction(config)
    if values.get("rollout_is") and (cap := values.get("rollout_is_threshold")) is not None:
        yield from _find_malformed(_IS, "rollout_is", 2.0, lambda: read_verl_weight_bounds(cap, _IS))
    rejection, bound = values.get("rollout_rs"), values.get("rollout_rs_threshold")
    if rejection:
        read = partial(read_verl_rejections, rejection, bound, f"{VERL}.")
        malformed = list(_find_malformed(_RS, "rollout_rs", _get_usual(str(rejection)), read))
        yield from malformed or _find_inverted(str(rejection), bound)


def _find_malformed(key: str, owner: str, proposed: str | float, read: Callable[[], object]) -> Iterator[Problem]:
    try:
        read()
    except SpecError as error:
        overrides = (set_to(key, proposed),) if error.problem.key == key else error.problem.overrides
        yield replace(error.problem, parts=(name_part(owner),), overrides=overrides)


def _get_usual(rejection: str) -> str:
    """Return a usual threshold for verl's options: a pair of ratios for k1, else an upper bound in nats."""
    names = dict.fromkeys(name.strip() for name in rejection.split(",") if name.strip())
    return ",".join("0.5_2.0" if name.endswith("k1") else "0.01" if "mean" in name else "2.0" for name in names)


def _find_inverted(rejection: str, bound: Any) -> Iterator[Problem]:
    """Find bands for k1 = -log r that are written for r: "lo_hi" bounds mu / pi_old, so that a pair that is wide above
    is how pi_old / mu would be bounded.

    Symmetric pairs such as 0.5_2.0 are the same either way; lopsided by more than a tenth of their width in nats they
    are not.
    """
    names = list(dict.fromkeys(name.strip() for name in rejection.split(",") if name.strip()))
    texts = [text.strip() for text in str(bound).split(",") if text.strip()]
    texts = texts * len(names) if len(texts) == 1 else texts
    for index, (name, text) in enumerate(zip(names, texts, strict=True)):
        if not name.endswith("_k1") or "_" not in text:
            continue
        lower, upper = (float(each) for each in text.split("_"))
        middle = math.log(lower) + math.log(upper)
        if abs(middle) <= _LOPSIDED * (math.log(upper) - math.log(lower)):
            continue
        band = f"pi_old / mu in [{1 / upper:.4g}, {1 / lower:.4g}]"
        if middle < 0:
            reason = f"k1 bounds mu / pi_old: {name} keeps {band}."
            yield Problem(_RS, bound, reason, "Leave it where that is meant.", "NOTE", (name_part("rollout_rs"),))
            continue
        mirrored = f"{1 / upper:.6g}_{1 / lower:.6g}"
        texts_then = [mirrored if place == index else each for place, each in enumerate(texts)]
        yield Problem(
            _RS,
            bound,
            f"k1 bounds mu / pi_old, the inverse of the importance ratio: {name} keeps {band}, where {text} reads as "
            f"a band of ratios.",
            f"Set {_RS}='{mirrored}' for pi_old / mu in [{lower:g}, {upper:g}].",
            "ERROR",
            (name_part("rollout_rs"),),
            (set_to(_RS, ",".join(texts_then)),),
        )
