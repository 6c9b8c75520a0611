"""Specification of a correction: one weight, any number of named masks, and their options; validated once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .correction_parts import KEYS as SUPPORT_KEYS
from .correction_parts import Baseline, CorrectionParts, Denominator, Nonfinite, read_support
from .dialects import PEERS
from .dialects.outward import build_skyrl, build_trl, build_verl
from .mask_spec import MaskSpec
from .problem import SpecError, find_closest
from .proximal import BY_AGE, Alpha, Proximal
from .rules import check_together, read_centering
from .terms import KlWeightSpec, PenaltySpec
from .validation import (
    check_known_keys,
    check_metric_name,
    read_bool,
    read_choice,
    read_number,
    read_ratio_bounds,
    require_keys,
    require_mapping,
)
from .weights import WeightSpec

_KEYS = (
    "weight",
    "weights",
    "masks",
    "proximal",
    "alpha",
    "denominator",
    "baseline",
    "kl_clip",
    "kl_weight",
    "penalty",
    "nonfinite",
    "skyrl_compat",
    "allow_truncated_sampling",
    "centering",
    *SUPPORT_KEYS,
)


class CorrectionSpec(CorrectionParts):
    """A correction, read from plain values and checked as a whole."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> CorrectionSpec:
        """Build from the plain values under the Hydra key ``correction``; null masks and named weights are removed.

        Raises:
            SpecError: a malformed value, or parts that cannot be combined.
        """
        if not isinstance(mapping, Mapping):
            raise SpecError(
                "expected a mapping with the keys weight and masks.",
                "Set correction=none to train uncorrected.",
                key="correction",
                value=mapping,
            )
        mapping = _drop_removed(mapping)
        _refuse_beside_its_part(mapping)
        check_known_keys(mapping, _KEYS, "correction")
        spec = cls(
            weight=_weight(mapping.get("weight")),
            masks=_masks(mapping.get("masks")),
            proximal=read_choice(mapping, "proximal", Proximal, "correction", "recompute"),
            alpha=_alpha(mapping.get("alpha")),
            denominator=read_choice(mapping, "denominator", Denominator, "correction", "original"),
            baseline=read_choice(mapping, "baseline", Baseline, "correction", "include"),
            kl_clip=_kl_clip(mapping.get("kl_clip")),
            skyrl_compat=read_bool(mapping, "skyrl_compat", "correction"),
            allow_truncated_sampling=read_bool(mapping, "allow_truncated_sampling", "correction"),
            weights=_weights(mapping.get("weights")),
            penalty=_penalty(mapping.get("penalty")),
            kl_weight=_kl_weight(mapping.get("kl_weight")),
            nonfinite=read_choice(mapping, "nonfinite", Nonfinite, "correction", "counted"),
            centering=read_centering(mapping),
            **read_support(mapping),
        )
        check_together(spec)
        return spec

    @classmethod
    def from_peer(cls, name: str, source: Any) -> CorrectionSpec:
        """Build from another framework's configuration: a mapping (whole, or one section) or an object.

        Args:
            name: a key of ``dialects.PEERS``. A missing key takes the default of the newest release listed there.

        Raises:
            SpecError: for the same reasons as in ``Peer.read_source``.

        Example:
            >>> CorrectionSpec.from_peer("slime", {"use_tis": True}).weight.upper
            2.0
        """
        return cls.from_mapping(PEERS[name].read_source(source).plain)

    @classmethod
    def from_skyrl(cls, source: Any) -> CorrectionSpec:
        """Build from SkyRL's ``trainer.algorithm``, or its ``off_policy_correction``."""
        return cls.from_peer("skyrl", source)

    @classmethod
    def from_trl(cls, source: Any) -> CorrectionSpec:
        """Build from TRL's ``GRPOConfig``."""
        return cls.from_peer("trl", source)

    @classmethod
    def from_verl(cls, source: Any) -> CorrectionSpec:
        """Build from verl's ``algorithm.rollout_correction``; missing keys take the defaults in verl's YAML."""
        return cls.from_peer("verl", {} if source is None else source)

    def to_skyrl(self) -> dict[str, Any]:
        """Return the equivalent ``off_policy_correction`` of SkyRL; SpecError if there is none."""
        return build_skyrl(self)

    def to_trl(self) -> dict[str, Any]:
        """Return the equivalent fields of TRL's ``GRPOConfig``; SpecError if there are none."""
        return build_trl(self)

    def to_verl(self) -> dict[str, Any]:
        """Return the equivalent ``algorithm.rollout_correction`` of verl; SpecError if there is none."""
        return build_verl(self)

    def fingerprint(self) -> int:
        """Return an integer in [0, 2^31), equal for equal specs, in every process and release."""
        # Metrics store the fingerprint as a float, which represents 31 bits exactly.
        text = json.dumps(self.to_mapping(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _drop_removed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Drop parts that are null, because ``correction.masks.gsm=null`` means ``~correction.masks.gsm``, also in YAML."""
    named = {name: each for name in ("masks", "weights") if isinstance(each := mapping.get(name), Mapping)}
    return {**mapping} | {name: {k: v for k, v in parts.items() if v is not None} for name, parts in named.items()}


def _refuse_beside_its_part(mapping: Mapping[str, Any]) -> None:
    """Refuse a part's key outside the part, such as ``masks.upper`` or ``gsm.upper``.

    Raises:
        SpecError: names the key in each part that has such a key.
    """
    sections = {name: each for name in ("masks", "weights") if isinstance(each := mapping.get(name), Mapping)}
    parts = {"weight": mapping.get("weight")} | {
        f"{section}.{name}": part for section, named in sections.items() for name, part in named.items()
    }
    whole = {place: part for place, part in parts.items() if isinstance(part, Mapping) and "level" in part}
    outside = {name: value for name, value in mapping.items() if name not in _KEYS}
    outside |= {place: part for place, part in parts.items() if place != "weight" and not isinstance(part, Mapping)}
    for place, value in outside.items():
        hint, _, last = str(place).rpartition(".")
        hint, given = (str(place), value) if isinstance(value, Mapping) else (hint, {last: value})
        near = {str(name): find_closest(str(name), {key for part in whole.values() for key in part}) for name in given}
        having = [each for each, part in whole.items() if set(near.values()) <= part.keys()]
        named = [each for each in having if each.split(".")[-1] == hint]
        owners = named or [each for each in having if each.startswith(hint.removesuffix("s"))] or having
        meant = [{f"correction.{each}.{near[name]}": given[name] for name in near} for each in owners if near]
        if meant:
            said = " or ".join(" and ".join(each) for each in meant)
            key = f"correction.{place}"
            proposed, removed = (meant[0], {key: value}) if len(meant) == 1 else ({}, None)
            raise SpecError(
                "unknown key.", f"Did you mean {said}?", key=key, value=value, proposed=proposed, removed=removed
            )


def _alpha(value: Any) -> Alpha | None:
    return BY_AGE if value == BY_AGE else read_number(value, "correction.alpha")


def _weight(value: Any) -> WeightSpec | None:
    if value is None:
        return None
    key = "correction.weight"
    fix = "Choose an option that has a weight, such as tis_token, in correction=[...]."
    given = require_mapping(value, key, fix, None)
    for name in ("when", "sign"):
        if name in given:
            raise SpecError(
                "weight applies to every token.",
                f"Give the weight as correction.weights.<name>, with {name}, or leave {name} out.",
                key=f"{key}.{name}",
                value=given[name],
                meant={"correction.weights.signed": dict(given), key: None},
            )
    return WeightSpec.from_mapping(given, key=key)


def _weights(value: Any) -> tuple[tuple[str, WeightSpec], ...]:
    whole, option = "correction.weights", "Choose an option that has them, such as paper/topr, in correction=[...]."
    weights = require_mapping({} if value is None else value, whole, option, {})
    specs = []
    for given, weight in sorted((str(name), weight) for name, weight in weights.items()):
        name, key = check_metric_name(given, whole, weight), f"{whole}.{given}"
        mapping = require_mapping(weight, key, option)
        if mapping.get("when", "???") == "???":
            raise SpecError(
                "not set; it has no default.",
                f"Set {key}.when=negative, positive or any: the advantages whose tokens it weighs.",
                key=f"{key}.when",
                value="???",
                proposed={f"{key}.when": "negative"},
            )
        specs.append((name, WeightSpec.from_mapping(mapping, key=key)))
    return tuple(specs)


def _refuse_misspelt(given: str, masks: Mapping[str, Any]) -> None:
    """Refuse incomplete keys of a nonexistent mask if its name resembles that of an existing mask.

    Raises:
        SpecError: names the existing mask.
    """
    keys = masks.get(given)
    if not isinstance(keys, Mapping) or {"level", "aggregate"} & set(keys):
        return
    whole = [name for name, mask in masks.items() if isinstance(mask, Mapping) and "level" in mask]
    if near := find_closest(given, map(str, whole), 0.6):
        meant = {f"correction.masks.{near}.{name}": value for name, value in keys.items()}
        key = f"correction.masks.{given}"
        said = f"there is no such mask. Did you mean {' and '.join(meant)}?"
        raise SpecError(said, key=key, value=dict(keys), proposed=meant, removed={key: keys})


def _masks(value: Any) -> tuple[tuple[str, MaskSpec], ...]:
    whole, option = "correction.masks", "Choose an option that has masks, such as gsm, in correction=[...]."
    masks = require_mapping({} if value is None else value, whole, option, {})
    specs = []
    for given, mask in sorted((str(name), mask) for name, mask in masks.items()):
        _refuse_misspelt(given, masks)
        name, key = check_metric_name(given, whole, mask), f"{whole}.{given}"
        specs.append((name, MaskSpec.from_mapping(require_mapping(mask, key, option), key=key)))
    return tuple(specs)


def _penalty(value: Any) -> PenaltySpec | None:
    if value is None:
        return None
    key = "correction.penalty"
    fix = "Choose an option that has a penalty, such as log_ratio_penalty, in correction=[...]."
    return PenaltySpec.from_mapping(require_mapping(value, key, fix, None), key=key)


def _kl_weight(value: Any) -> KlWeightSpec | None:
    if value is None:
        return None
    key = "correction.kl_weight"
    fix = "Choose an option that has it, such as kl_unbiased, in correction=[...]."
    return KlWeightSpec.from_mapping(require_mapping(value, key, fix, None), key=key)


def _kl_clip(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    key = "correction.kl_clip"
    # A single number is read like PPO's own clip: it is the distance of both bounds from 1.
    width = value if isinstance(value, float) and 0 < value < 1 else 0.2
    bounds_around_1 = {"lower": round(1 - width, 6), "upper": round(1 + width, 6)}
    if not isinstance(value, Mapping):
        raise SpecError("expected a mapping.", key=key, value=value, meant={key: bounds_around_1})
    mapping = value
    check_known_keys(mapping, {"lower", "upper"}, key)
    bounds = {"lower": None, "upper": None, **mapping}
    require_keys(bounds, {"lower", "upper"}, key)
    lower, upper = read_ratio_bounds(bounds, key)
    if lower is None or upper is None or not lower < 1 < upper:
        raise SpecError(
            "expected a clip of pi / pi_old: two bounds around 1.",
            f"Set {key}.lower=0.8 and {key}.upper=1.2 for example, as PPO clips its ratio.",
            key=key,
            value={"lower": lower, "upper": upper},
            proposed={f"{key}.lower": 0.8, f"{key}.upper": 1.2},
        )
    return lower, upper


__all__ = ["CorrectionSpec", "MaskSpec", "SpecError", "WeightSpec"]
