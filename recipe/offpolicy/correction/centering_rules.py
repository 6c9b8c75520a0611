"""What score centering cannot contain, see ``correction.centering``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .correction_parts import CorrectionParts
from .mask_spec import MaskSpec
from .problem import SpecError
from .proximal import MU_ITSELF

KEY = "correction.centering"


def centers_mask(mask: MaskSpec) -> bool:
    """Return True if C contains the mask's decision, because it follows from a token's own p / q.

    Example:
        >>> centers_mask(MaskSpec("rollout", "token", "product", 0.5, 2.0, "any"))
        True
    """
    entry = mask.entry
    return mask.level == "token" and entry.reduce not in ("batch", "oldest") and math.isfinite(entry.at(1.0))


def read_centering(mapping: Mapping[str, Any]) -> int | None:
    """Read K from the plain values under ``correction``; None: no centering.

    Raises:
        SpecError: not a number of tokens.

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
    """Refuse parts whose effect on tokens that were not sampled is unknown.

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


def find_unknown(spec: CorrectionParts) -> dict[str, tuple[Any, str]]:
    """Find the keys of such parts, below ``correction`` -> their values, and the reason.

    Example:
        >>> find_unknown(CorrectionParts(support="engine"))
        {'support': ('engine', 'the server returns the support, which may have fewer tokens.')}
    """
    found: dict[str, tuple[Any, str]] = {}
    for name, weight in spec.all_weights.items():
        if weight.level != "token":
            found[f"{name}.level"] = weight.level, "a weight of several tokens depends on those that were sampled."
        if weight.normalize:
            found[f"{name}.normalize"] = True, "the mean weight is known for sampled tokens alone."
    for name, mask in spec.masks:
        if mask.level != "token" or mask.entry.of_age:
            continue
        if mask.ratio == "ppo":
            found[f"masks.{name}.ratio"] = "ppo", "pi_old is known for sampled tokens alone."
        elif not centers_mask(mask):
            found[f"masks.{name}.aggregate"] = mask.aggregate, "this aggregate does not follow from a ratio alone."
    by_token = spec.all_weights | {f"masks.{name}": mask for name, mask in spec.masks if centers_mask(mask)}
    for name, part in by_token.items():
        if part.when != "any":
            found[f"{name}.when"] = part.when, "C has one factor for all tokens, whatever the advantage and the turn."
        if part.by_staleness is not None:
            found[f"{name}.by_staleness"] = list(part.by_staleness), "C has one pair of bounds for all ages."
    if spec.proximal in (*MU_ITSELF, "loglinear"):
        found["proximal"] = spec.proximal, "PPO's clip of pi / mu is part of that factor."
    if spec.skyrl_compat:
        found["skyrl_compat"] = True, "its order of masks is defined for sampled tokens alone."
    if spec.allow_truncated_sampling:
        found["allow_truncated_sampling"] = True, "pi is not normalised over the tokens that mu is normalised over."
    if spec.support is not None:
        found["support"] = spec.support, "the server returns the support, which may have fewer tokens."
    return found
