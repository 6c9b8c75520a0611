"""What a correction is: one weight and any number of named masks, validated once.

Every message names the key, the value and the fix, because a mistyped threshold that is taken for a valid one
degrades a run in silence.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from .ratios import EXP_CLAMP

Ratio = Literal["rollout", "full", "ppo"]
Level = Literal["token", "sequence"]
Aggregate = Literal["geometric", "product"]
When = Literal["any", "negative", "positive"]
Kind = Literal["truncate", "clip"]

_MISSING = "???"  # what OmegaConf leaves where a value is mandatory
_MASK_NAME = re.compile(r"[a-z][a-z0-9_]*")


class SpecError(ValueError):
    """A correction that cannot be what was meant; the message names key, value and fix."""


@dataclass(frozen=True)
class WeightSpec:
    """A detached importance weight on pi_old / mu.

    Attributes:
        level: ``token`` weighs each token by its own ratio, ``sequence`` every token by the row's product.
        kind: ``truncate`` binds one side, ``clip`` both.
        lower: least weight, > 0, or None for an open side.
        upper: greatest weight, > 0, or None for an open side.
    """

    level: Level
    kind: Kind
    lower: float | None
    upper: float | None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, key: str = "correction.weight") -> WeightSpec:
        """Build from plain values; ``key`` is the Hydra path that error messages show."""
        _require_keys(mapping, {"level", "kind", "lower", "upper"}, key)
        kind = _choice(mapping, "kind", Kind, key)
        lower, upper = _bounds(mapping, key)
        for side, bound in (("lower", lower), ("upper", upper)):
            if bound is not None and abs(math.log(bound)) > EXP_CLAMP:
                raise SpecError(
                    f"{key}.{side}={bound}: log-ratios are clamped to +-{EXP_CLAMP:g} nats, so that a weight never "
                    f"leaves [{math.exp(-EXP_CLAMP):.3g}, {math.exp(EXP_CLAMP):.3g}]. Set a bound inside, or "
                    f"null to leave that side open."
                )
        if kind == "truncate" and lower is not None and upper is not None:
            raise SpecError(
                f"{key}.lower={lower} with {key}.upper={upper}: kind 'truncate' binds one side. "
                f"Set {key}.kind=clip to bind both, or one of the bounds to null."
            )
        if kind == "clip" and (lower is None or upper is None):
            raise SpecError(
                f"{key}.kind=clip with lower={lower}, upper={upper}: 'clip' binds both sides. "
                f"Give both bounds, or set {key}.kind=truncate."
            )
        return cls(_choice(mapping, "level", Level, key), kind, lower, upper)

    def to_mapping(self) -> dict[str, Any]:
        return {"level": self.level, "kind": self.kind, "lower": self.lower, "upper": self.upper}


@dataclass(frozen=True)
class MaskSpec:
    """A band on a ratio of policies; what lies outside loses its gradient.

    Attributes:
        ratio: ``rollout`` pi_old / mu, ``full`` pi / mu, ``ppo`` pi / pi_old.
        level: ``sequence``: one decision a row.
        aggregate: ``geometric`` exp(mean log ratio), ``product`` exp(sum log ratio).
        lower, upper: inclusive bounds on the aggregated ratio, > 0; None leaves a side open.
        when: rows that it applies to, by the sign of the row's mean advantage over its valid tokens.
        delta: the bound as OPSM writes it, lower = exp(-delta) in nats; None when lower and upper were given.
    """

    ratio: Ratio
    level: Level
    aggregate: Aggregate
    lower: float | None
    upper: float | None
    when: When
    delta: float | None = None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, key: str) -> MaskSpec:
        """Build from plain values; ``key`` is the Hydra path that error messages show."""
        common = {"ratio", "level", "aggregate", "when"}
        lower: float | None
        upper: float | None
        if "delta" in mapping:
            if clash := sorted({"lower", "upper"} & set(mapping)):
                raise SpecError(
                    f"{key}.delta={mapping['delta']} with {key}.{clash[0]}={mapping[clash[0]]}: delta d stands for "
                    f"lower=exp(-d), upper=null. Give either delta or the two bounds."
                )
            _require_keys(mapping, common | {"delta"}, key)
            delta = _number(mapping["delta"], f"{key}.delta")
            if delta is None or delta < 0:
                raise SpecError(
                    f"{key}.delta={mapping['delta']}: a row is dropped when mean log(mu/pi) > delta, so delta must "
                    f"be a number >= 0, in nats a token. Set {key}.delta=0.1 for example."
                )
            if delta > EXP_CLAMP:
                raise SpecError(
                    f"{key}.delta={delta}: a drift of more than {EXP_CLAMP:g} nats never occurs in a mean, so that the "
                    f"mask never acts. Set {key}.delta=0.1 for example, or remove the mask."
                )
            lower, upper = math.exp(-delta), None
        else:
            _require_keys(mapping, common | {"lower", "upper"}, key)
            delta = None
            lower, upper = _bounds(mapping, key)
            if lower is None and upper is None:
                raise SpecError(
                    f"{key}.lower=null with {key}.upper=null: a mask with both sides open never acts. "
                    f"Set a bound, or remove the mask."
                )
        level = _choice(mapping, "level", Level, key)
        if level != "sequence":
            raise SpecError(f"{key}.level={level!r}: masks decide by row. Set {key}.level=sequence.")
        return cls(
            ratio=_choice(mapping, "ratio", Ratio, key),
            level=level,
            aggregate=_choice(mapping, "aggregate", Aggregate, key),
            lower=lower,
            upper=upper,
            when=_choice(mapping, "when", When, key),
            delta=delta,
        )

    def to_mapping(self) -> dict[str, Any]:
        mapping: dict[str, Any] = {"ratio": self.ratio, "level": self.level, "aggregate": self.aggregate}
        if self.delta is not None:
            return mapping | {"delta": self.delta, "when": self.when}
        return mapping | {"lower": self.lower, "upper": self.upper, "when": self.when}

    @property
    def log_bounds(self) -> tuple[float, float]:
        """Inclusive bounds on the aggregated log ratio, in nats; infinite where open."""
        if self.delta is not None:
            return -self.delta, math.inf
        lower = -math.inf if self.lower is None else math.log(self.lower)
        return lower, math.inf if self.upper is None else math.log(self.upper)

    @property
    def needs_step(self) -> bool:
        """Whether the decision waits for pi or for the advantages."""
        return self.ratio != "rollout" or self.when != "any"


@dataclass(frozen=True)
class CorrectionSpec:
    """A weight, masks that must all keep, and one consent.

    Attributes:
        weight: importance weight, or None for 1.
        masks: (name, mask) in name order; the order never matters to the result.
        allow_truncated_sampling: says that top-p, top-k, min-p or a repetition penalty is meant, although
            mu is then another distribution than the one pi_old is compared with.
    """

    weight: WeightSpec | None = None
    masks: tuple[tuple[str, MaskSpec], ...] = field(default=())
    allow_truncated_sampling: bool = False

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> CorrectionSpec:
        """Build from the plain values under the Hydra key ``correction``.

        Raises:
            SpecError: unknown or missing keys, values of the wrong type, bounds that cross or never act.
        """
        if mapping is None:
            raise SpecError("correction=null: nothing says what is meant. Set correction=none to train uncorrected.")
        if not isinstance(mapping, Mapping):
            raise SpecError(f"correction={mapping!r}: expected a mapping with the keys weight and masks.")
        _known_keys(mapping, {"weight", "masks", "allow_truncated_sampling"}, "correction")
        weight = mapping.get("weight")
        masks = mapping.get("masks")
        consent = mapping.get("allow_truncated_sampling", False)
        if not isinstance(consent, bool):
            raise SpecError(f"correction.allow_truncated_sampling={consent!r}: set true or false.")
        return cls(
            weight=None if weight is None else WeightSpec.from_mapping(_mapping(weight, "correction.weight")),
            masks=tuple(
                (_mask_name(name), MaskSpec.from_mapping(_mapping(mask, key), key=key))
                for name, mask, key in sorted(
                    (str(n), m, f"correction.masks.{n}")
                    for n, m in _mapping({} if masks is None else masks, "correction.masks").items()
                )
            ),
            allow_truncated_sampling=consent,
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain values from which ``from_mapping`` makes an equal spec."""
        return {
            "weight": None if self.weight is None else self.weight.to_mapping(),
            "masks": {name: mask.to_mapping() for name, mask in self.masks},
            "allow_truncated_sampling": self.allow_truncated_sampling,
        }

    def fingerprint(self) -> int:
        """An integer in [0, 2^31), equal for equal specs, in every process and release."""
        text = json.dumps(self.to_mapping(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    @property
    def is_none(self) -> bool:
        """Whether nothing is corrected."""
        return self.weight is None and not self.masks


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        shown = "null" if value is None else repr(value)
        raise SpecError(f"{key}={shown}: expected a mapping. Choose it by a group option, e.g. correction=gsm.")
    return value


def _known_keys(mapping: Mapping[str, Any], known: set[str], key: str) -> None:
    if unknown := sorted(str(name) for name in mapping if name not in known):
        name = unknown[0]
        raise SpecError(
            f"{key}.{name}={mapping.get(name)!r}: unknown key. Known under {key}: {', '.join(sorted(known))}."
        )


def _require_keys(mapping: Mapping[str, Any], keys: set[str], key: str) -> None:
    _known_keys(mapping, keys, key)
    for name in sorted(keys - set(mapping)):
        hint = "null leaves that side open" if name in {"lower", "upper"} else "it has no default"
        raise SpecError(f"{key}.{name} is not set ({hint}). Set {key}.{name}=...")
    for name in sorted(keys):
        if mapping[name] == _MISSING:
            hint = " OPSM has no published default." if name == "delta" else ""
            raise SpecError(f"{key}.{name} is required and not set.{hint} Set {key}.{name}=...")


def _choice(mapping: Mapping[str, Any], name: str, options: Any, key: str) -> Any:
    allowed = get_args(options)
    if (value := mapping[name]) not in allowed:
        raise SpecError(f"{key}.{name}={value!r}: set one of {', '.join(allowed)}.")
    return cast(Any, value)


def _number(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SpecError(f"{key}={value!r}: expected a number or null, not {type(value).__name__}.")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond float64
        number = math.inf
    if not math.isfinite(number):
        raise SpecError(f"{key}={value}: expected a finite number. Write null for an open side.")
    return number + 0.0  # -0.0 is 0.0, also in the fingerprint


def _bounds(mapping: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    lower, upper = (_number(mapping[side], f"{key}.{side}") for side in ("lower", "upper"))
    for side, bound in (("lower", lower), ("upper", upper)):
        if bound is not None and bound <= 0:
            raise SpecError(f"{key}.{side}={bound}: ratios are positive. Set a bound > 0, or null to leave it open.")
    if lower is not None and upper is not None and lower > upper:
        raise SpecError(f"{key}.lower={lower} > {key}.upper={upper}: nothing lies between. Swap the bounds.")
    return lower, upper


def _mask_name(name: str) -> str:
    # The name becomes part of a metric, and verl reduces by substring: "min" and "max" change the reduction.
    if not _MASK_NAME.fullmatch(name) or "min" in name or "max" in name:
        raise SpecError(
            f"correction.masks.{name}: a mask's name is lower case letters, digits and _, without 'min' or 'max' "
            f"(verl reduces metrics by those). Rename the mask."
        )
    return name
