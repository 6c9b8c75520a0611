"""Another framework's options by full path, readers of their values, and builders of our plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..problem import SpecError
from ..ratios import EXP_CLAMP
from ..validation import read_number


@dataclass(frozen=True)
class Options:
    """Values of the keys that a converter reads, by full path; an error shows the framework's own key and value.

    Attributes:
        values: values of all these keys, with the framework's default for a key that is not given.
        given: the keys that are given.

    Example:
        >>> options = Options({"tis": True, "cap": 2, "level": "token"})
        >>> options.flag("tis"), options.bound("cap"), options.choice("level", "token", "sequence")
        (True, 2.0, 'token')
    """

    values: Mapping[str, Any]
    given: frozenset[str] = frozenset()

    def __getitem__(self, path: str) -> Any:
        return self.values[path]

    def has_section(self, path: str) -> bool:
        """Return True if a section is given and not null; it may be empty."""
        below = any(each.startswith(f"{path}.") for each in self.given)
        return below or (path in self.given and self.values[path] is not None)

    def refuse(self, key: str, reason: str, fix: str = "", also: str = "") -> SpecError:
        """Build the error for an option that has no equivalent here; ``also`` is another key on which this depends."""
        alongside = {also: self.values[also]} if also else None
        return SpecError(reason, fix, key=key, value=self.values[key], alongside=alongside)

    def choice(self, key: str, *known: str) -> str:
        """Read one of the known values."""
        if (value := self.values[key]) not in known:
            raise self.refuse(key, "no such choice.", f"Set one of {', '.join(known)}.")
        return known[known.index(value)]

    def choice_or_null(self, key: str, *known: str) -> str | None:
        """Read one of the known values, or null."""
        if (value := self.values[key]) not in (None, *known):
            raise self.refuse(key, "no such choice.", f"Set one of null, {', '.join(known)}.")
        return None if value is None else known[known.index(value)]

    def flag(self, key: str) -> bool:
        """Read True or False from a key that has a default."""
        if not isinstance(value := self.values[key], bool):
            raise self.refuse(key, "not a truth value.", "Set true or false.")
        return value

    def number(self, key: str) -> float | None:
        """Read a finite number, or null."""
        return read_number(self.values[key], key)

    def width(self, key: str) -> float:
        """Read a number of at least 0 from a key that has a default."""
        width = self.number(key)
        if width is None or width < 0:
            raise self.refuse(key, "expected a number of at least 0.")
        return width

    def bound(self, key: str, *, zero_opens: bool = False) -> float | None:
        """Read a bound on a ratio; with ``zero_opens``, 0 leaves the side open, as null does."""
        return None if zero_opens and self.number(key) == 0 else read_ratio_bound(self.values[key], key)

    def check_weight_of_rows(self, weight: Mapping[str, Any] | None, name: str, key: str) -> None:
        """Refuse per-token or per-turn weights if the base loss has one ratio per row and differentiates its mean.

        The sum of a row's weights then scales the gradient of the whole row. verl's ``gspo`` multiplies the gradient of
        each token by the token's own weight.
        """
        if weight is not None and weight["level"] != "sequence":
            reason = (
                f"{name} multiplies the gradient of a row's ratio by the weights of its tokens, whereas verl's gspo "
                "multiplies each token's own gradient."
            )
            raise self.refuse(key, reason)


def read_ratio_bound(value: Any, key: str) -> float | None:
    """Read a bound on a ratio; it must be a value that a log-ratio clamped to +-20 nats can reach.

    Example:
        >>> read_ratio_bound(2, "tis.cap")
        2.0
    """
    bound = read_number(value, key)
    if bound is not None and bound <= 0:
        fix = "Set a bound above 0, or null to leave a side open."
        raise SpecError("ratios are positive.", fix, key=key, value=value)
    if bound is not None and abs(math.log(bound)) > EXP_CLAMP:
        reason = f"log-ratios are clamped to +-{EXP_CLAMP:g} nats, so this bound never acts."
        fix = f"Set one between {math.exp(-EXP_CLAMP):.3g} and {math.exp(EXP_CLAMP):.3g}."
        raise SpecError(reason, fix, key=key, value=value)
    return bound


def build_mask(
    level: str, aggregate: str, lower: float | None, upper: float | None, ratio: str = "rollout"
) -> dict[str, Any]:
    """Build the plain values of a mask that applies to advantages of either sign.

    Example:
        >>> build_mask("token", "product", 0.5, 2.0)["when"]
        'any'
    """
    bounds = {"lower": lower, "upper": upper}
    return {"ratio": ratio, "level": level, "aggregate": aggregate, "when": "any", **bounds}


def build_opsm(delta: float, ratio: str = "full", sign: str = "row") -> dict[str, Any]:
    """Build the plain values of off-policy sequence masking.

    Example:
        >>> build_opsm(0.1)["delta"]
        0.1
    """
    opsm = {"ratio": ratio, "level": "sequence", "aggregate": "geometric", "delta": delta, "when": "negative"}
    return opsm | {"sign": sign}


def build_dppo_masks(low: float, high: float) -> dict[str, Any]:
    """Build masks of tokens whose p_pi is more than ``high`` above or ``low`` below p_mu and would move further away.

    For a width of 1 or more, no mask is built, because no difference of probabilities exceeds such a width.

    Example:
        >>> list(build_dppo_masks(0.2, 1.0))
        ['dppo_negative']
    """
    up = build_mask("token", "binary_tv", None, high, "full") | {"when": "positive", "sign": "token"}
    down = build_mask("token", "binary_tv", -low, None, "full") | {"when": "negative", "sign": "token"}
    return ({"dppo_positive": up} if high < 1 else {}) | ({"dppo_negative": down} if low < 1 else {})


def build_weight(
    level: str, lower: float | None, upper: float | None, *, reject: bool = False, **more: Any
) -> dict[str, Any]:
    """Build the plain values of a weight with the given bounds; a lower bound of 0 leaves that side open.

    Example:
        >>> build_weight("token", 0.0, 2.0)["kind"], build_weight("token", 0.5, 2.0)["kind"]
        ('truncate', 'clip')
    """
    lower = lower or None
    kind = "reject" if reject else "truncate" if lower is None or upper is None else "clip"
    return {"level": level, "kind": kind, "lower": lower, "upper": upper, **more}
