"""Bounds of a correction that can be calibrated from a recording; each bound is moved by one number, its radius."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...correction import CorrectionSpec, MaskSpec, SpecError, WeightSpec

Side = Literal["both", "lower", "upper"]
ShareOf = Literal["tokens", "rows", "turns", "versions"]

PLACEHOLDER = 1.0
"""Placeholder, in nats, for a required but unset delta, so that the rest of the correction can be parsed."""
_OPEN = "???"  # OmegaConf's value for a mandatory key that is not set
_UNITS: dict[str, ShareOf] = {
    "token": "tokens",
    "sequence": "rows",
    "turn": "turns",
    "version": "versions",
    "prefix": "tokens",
}
_SIGNS = {
    "positive": " with A > 0",
    "negative": " with A < 0",
    "outward": " with A log r > 0",
    "post_tool": " after a tool's result",
}


@dataclass(frozen=True)
class BoundedPart:
    """A mask or weight whose bound is calibrated.

    Attributes:
        key: ``masks.<name>``, ``weight`` or ``weights.<name>``.
        spec: its specification.
        side: ``both`` moves the bounds symmetrically around the point of no mismatch, in log space if they are ratios;
            ``lower`` and ``upper`` move one bound and leave the other unchanged.
        unset: the bound has no value yet.
    """

    key: str
    spec: MaskSpec | WeightSpec
    side: Side
    unset: bool = False

    @property
    def rejects(self) -> bool:
        """True if a unit outside the bounds is dropped, False if its weight is truncated."""
        return isinstance(self.spec, MaskSpec) or self.spec.kind == "reject"

    @property
    def share_of(self) -> ShareOf:
        """Name of the units that kept shares count: the units of the decision, or tokens if signs are per token."""
        return "tokens" if self.spec.picks_tokens else _UNITS[self.spec.level]

    @property
    def looks_at(self) -> str:
        """The units to which kept shares refer: ``rows``, or ``rows with A < 0`` for a part of one sign."""
        return f"{self.share_of}{_SIGNS.get(self.spec.when, '')}"

    @property
    def by_batch(self) -> bool:
        """True if the bound is a budget, which gives each batch its own cut-off (M2PO)."""
        return isinstance(self.spec, MaskSpec) and self.spec.budget is not None

    @property
    def on_ratio(self) -> bool:
        """True if the bounds are ratios, which are compared as their logs."""
        return isinstance(self.spec, WeightSpec) or self.spec.entry.on_ratio

    @property
    def limits(self) -> tuple[float, float]:
        """Bounds as the part compares them, infinite if open; a budget bounds the running mean of squares."""
        if isinstance(self.spec, MaskSpec):
            return (-math.inf, self.spec.budget) if self.spec.budget is not None else self.spec.limits
        lower, upper = self.spec.lower, self.spec.upper
        return -math.inf if lower is None else math.log(lower), math.inf if upper is None else math.log(upper)

    def compute_radius(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the radius of the bound that keeps each unit.

        Args:
            low, high: smallest and largest compared value of each unit.
        """
        if self.side == "both":
            return np.maximum(high, -low)
        return high if self.side == "upper" else -low

    def compute_limits_at(self, radius: float) -> tuple[float, float]:
        """Compute the bounds for the comparison, with the moving bound at ``radius``."""
        lower, upper = self.limits
        if self.side == "both":
            return -radius, radius
        return (lower, radius) if self.side == "upper" else (-radius, upper)

    def compute_limits_with(self, values: Mapping[str, float]) -> tuple[float, float]:
        """Compute the bounds for the comparison, from these configured values instead of the current values."""
        lower, upper = self.limits
        for name, value in values.items():
            if name == "delta":
                lower = -value
            elif name == "budget":
                upper = value
            else:
                limit = math.log(value) if self.on_ratio else value
                lower, upper = (limit, upper) if name == "lower" else (lower, limit)
        return lower, upper

    def compute_values_at(self, radius: float) -> dict[str, float]:
        """Compute the configured values of the moving bounds at ``radius``."""
        if self.by_batch:
            return {"budget": radius}
        if isinstance(self.spec, MaskSpec) and self.spec.delta is not None:
            return {"delta": radius}
        sides = {
            name: math.exp(limit) if self.on_ratio else limit for name, limit in (("lower", -radius), ("upper", radius))
        }
        return sides if self.side == "both" else {self.side: sides[self.side]}

    @property
    def now(self) -> dict[str, float | None]:
        """The configured values of the moving bounds; None if they have no values yet."""
        return {name: None if self.unset else getattr(self.spec, name) for name in self.compute_values_at(0.0)}


def list_parts(spec: CorrectionSpec, unset: Collection[str] = ()) -> list[BoundedPart]:
    """List the parts of ``spec`` that can be calibrated.

    Args:
        unset: keys under ``correction`` whose values are placeholders.

    Raises:
        SpecError: there is nothing to calibrate, or some parts depend on others.
    """
    if spec.skyrl_compat:
        raise SpecError(
            "correction.skyrl_compat=true: the input of a sequence mask depends on the masks before it, so no bound "
            "can be calibrated on its own. Calibrate with correction.skyrl_compat=false."
        )
    named: dict[str, MaskSpec | WeightSpec] = {f"masks.{name}": mask for name, mask in spec.masks}
    named |= spec.all_weights
    found = [
        BoundedPart(name, part, _find_side(part), any(entry.startswith(f"{name}.") for entry in unset))
        for name, part in named.items()
        if isinstance(part, MaskSpec) or part.lower is not None or part.upper is not None
    ]
    if not found:
        raise SpecError(
            f"correction: none of its parts ({', '.join(named) or 'none'}) is a weight or mask with a bound. Name "
            "parts that have one: --spec 'correction=[tis_token,gsm]'."
        )
    return found


def fill_placeholders(plain: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Set each required but unset delta to ``PLACEHOLDER``; return the values and the keys that were set."""
    masks = plain.get("masks")
    if not isinstance(masks, Mapping):
        return dict(plain), frozenset()
    filled, unset = dict(masks), set()
    for name, mask in masks.items():
        if isinstance(mask, Mapping) and mask.get("delta") == _OPEN:
            filled[name] = {**mask, "delta": PLACEHOLDER}
            unset.add(f"masks.{name}.delta")
    return {**plain, "masks": filled}, frozenset(unset)


def set_values(spec: CorrectionSpec, key: str, values: Mapping[str, float]) -> CorrectionSpec:
    """Return ``spec`` with these values in one of its parts.

    Raises:
        SpecError: the part cannot have these values.
    """
    plain = spec.to_mapping()
    node = plain
    for name in key.split("."):
        node = node[name]
    node.update(values)
    return CorrectionSpec.from_mapping(plain)


def _find_side(part: MaskSpec | WeightSpec) -> Side:
    if isinstance(part, MaskSpec) and part.delta is not None:
        return "lower"
    if isinstance(part, MaskSpec) and (part.budget is not None or part.entry.one_sided):
        return "upper"
    if part.lower is not None and part.upper is not None:
        return "both"
    return "upper" if part.lower is None else "lower"
