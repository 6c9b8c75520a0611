"""Parsing of ``offpolicy.shadow``: options of the group ``correction`` that are reported and not applied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..correction import CorrectionSpec, SpecError

_MISSING = "???"  # what OmegaConf leaves where a value is mandatory
_KEY = "offpolicy.shadow"
SHIPPED_DELTA = 0.1
"""Of ``offpolicy.shadow_delta``, in nats a token."""


def parse_shadows(
    names: Iterable[str], values: Callable[[str], Mapping[str, Any]], default_delta: float
) -> tuple[dict[str, CorrectionSpec], list[str]]:
    """Parse the corrections to report on, by the names of their options.

    Args:
        names: options of the group ``correction``.
        values: the plain values of an option; a mandatory value that the option leaves open is "???".
        default_delta: in nats a token, for OPSM's delta where it is left open: a report needs a number, a run must be
            given one.

    Returns:
        Name -> correction, and a sentence for each delta that was filled in.

    Raises:
        SpecError: an option that cannot be reported on, or malformed values.
    """
    shadows: dict[str, CorrectionSpec] = {}
    notes: list[str] = []
    if isinstance(default_delta, bool) or not isinstance(default_delta, int | float) or not default_delta > 0:
        key = f"{_KEY}_delta"
        raise SpecError(
            "a drift in nats a token, a number > 0.", key=key, value=default_delta, mend={key: SHIPPED_DELTA}
        )
    names = list(names)
    for name in names:
        without = {_KEY: [other for other in dict.fromkeys(names) if other != name]}
        if not isinstance(name, str):
            raise SpecError("no option of the group correction.", key=_KEY, value=name, mend=without)
        if name in shadows:
            raise SpecError("named twice.", key=_KEY, value=name, mend={_KEY: list(dict.fromkeys(names))})
        if not re.fullmatch(r"[a-z0-9_/]+", name) or "min" in name or "max" in name:
            raise SpecError(
                "one option is named in lower case letters, digits, _ and /, without 'min' or 'max' (verl reduces "
                "metrics by those).",
                f"Write several as a list, {_KEY}=[gsm,opsm].",
                key=_KEY,
                value=name,
                mend=without,
            )
        try:
            plain, filled = _fill_delta(values(name), default_delta)
            spec = CorrectionSpec.from_mapping(plain)
        except SpecError as error:
            raise SpecError(error.problem.statement, key=_KEY, value=name, mend=without) from error
        if spec.proximal != "recompute":
            raise SpecError(
                f"its correction.proximal={spec.proximal} changes pi_old and with it the run itself, so that it cannot "
                f"be reported on beside another.",
                key=_KEY,
                value=name,
                mend=without,
            )
        if not spec.all_weights and not spec.masks:
            raise SpecError("it has no weight and no mask to report on.", key=_KEY, value=name, mend=without)
        shadows[name] = spec
        notes += [
            f"shadow {name}: {key} is not set; {default_delta:g} nats a token is used to report" for key in filled
        ]
    return shadows, notes


def check_beside(spec: CorrectionSpec, shadows: Mapping[str, CorrectionSpec]) -> None:
    """Check that shadows are well formed with the run's ``proximal``, whose pi_old they see.

    Raises:
        SpecError: a shadow that would be malformed with the run's ``proximal``.
    """
    for name, shadow in shadows.items():
        try:
            CorrectionSpec.from_mapping(shadow.to_mapping() | {"proximal": spec.proximal, "alpha": spec.alpha})
        except SpecError as error:
            left = {_KEY: [other for other in shadows if other != name]}
            raise SpecError(error.problem.statement, key=_KEY, value=name, mend=left) from error


def _fill_delta(plain: Mapping[str, Any], default_delta: float) -> tuple[dict[str, Any], list[str]]:
    """Fill in each mask's open delta; returns the values and the keys that were filled."""
    masks = plain.get("masks")
    if not isinstance(masks, Mapping):
        return dict(plain), []
    filled, open_keys = dict(masks), []
    for name, mask in masks.items():
        if isinstance(mask, Mapping) and mask.get("delta") == _MISSING:
            filled[name] = {**mask, "delta": default_delta}
            open_keys.append(f"correction.masks.{name}.delta")
    return {**plain, "masks": filled}, open_keys
