"""Specification of a correction: one weight, any number of named masks, and their options; validated once.

The functions at the end of this file format bounds as text, and handle bounds that move from update to update. The rest
of a spec is its structure. In the structure's fingerprint, a marker replaces each moving bound, so the fingerprint
stays the same for a whole run. The bounds themselves are sent with each update.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

from .correction_parts import (
    SUPPORT_KEYS,
    Baseline,
    CorrectionParts,
    Denominator,
    Nonfinite,
    Proximal,
)
from .dialects import PEERS
from .dialects.outward import build_skyrl, build_trl, build_verl
from .problem import SpecError
from .read_parts import (
    read_alpha,
    read_count,
    read_kl_clip,
    read_kl_weight,
    read_mask,
    read_penalty,
    read_support,
    read_weight,
)
from .rules import check_together
from .validation import check_known_keys, check_metric_name, read_bool, read_choice, require_mapping
from .weights import WeightSpec

_LIKELIEST: Final = (
    "expected the number of likeliest tokens that the engine returns at each position, 1 or more, or null."
)
_KEYS: Final = (
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
        _refuse_outside_its_part(mapping)
        check_known_keys(mapping, _KEYS, "correction")
        spec = cls(
            weight=_read_whole_weight(mapping.get("weight")),
            masks=_read_named(mapping, "masks", "gsm", read_mask),
            proximal=read_choice(mapping, "proximal", Proximal, "correction", "recompute"),
            alpha=read_alpha(mapping.get("alpha")),
            denominator=read_choice(mapping, "denominator", Denominator, "correction", "original"),
            baseline=read_choice(mapping, "baseline", Baseline, "correction", "include"),
            kl_clip=read_kl_clip(mapping.get("kl_clip")),
            skyrl_compat=read_bool(mapping, "skyrl_compat", "correction"),
            allow_truncated_sampling=read_bool(mapping, "allow_truncated_sampling", "correction"),
            weights=_read_named(mapping, "weights", "paper/topr", _read_named_weight),
            penalty=_read_term(mapping, "penalty", read_penalty, "log_ratio_penalty"),
            kl_weight=_read_term(mapping, "kl_weight", read_kl_weight, "kl_unbiased"),
            nonfinite=read_choice(mapping, "nonfinite", Nonfinite, "correction", "counted"),
            centering=read_count(mapping, "centering", _LIKELIEST, 20),
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
        return _hash(self.to_mapping())


def _hash(mapping: Mapping[str, Any]) -> int:
    # Metrics store the fingerprint as a float, which represents 31 bits exactly.
    text = json.dumps(mapping, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _drop_removed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Drop parts that are null, because ``correction.masks.gsm=null`` means ``~correction.masks.gsm``, also in YAML."""
    named = {name: each for name in ("masks", "weights") if isinstance(each := mapping.get(name), Mapping)}
    return {**mapping} | {name: {k: v for k, v in parts.items() if v is not None} for name, parts in named.items()}


def _refuse_outside_its_part(mapping: Mapping[str, Any]) -> None:
    """Reject a part's key outside that part, such as ``masks.upper`` or ``gsm.upper``; the error names the part."""
    sections = {name: each for name in ("masks", "weights") if isinstance(each := mapping.get(name), Mapping)}
    named = {f"{section}.{name}": part for section, parts in sections.items() for name, part in parts.items()}
    parts = {"weight": mapping.get("weight")} | named
    whole = {place: part for place, part in parts.items() if isinstance(part, Mapping) and "level" in part}
    outside = {str(name): value for name, value in mapping.items() if name not in _KEYS}
    outside |= {place: part for place, part in named.items() if not isinstance(part, Mapping)}
    for place, value in outside.items():
        given = value if isinstance(value, Mapping) else {place.rpartition(".")[2]: value}
        owners = [each for each, part in whole.items() if given and given.keys() <= part.keys()]
        section = place.rpartition(".")[0].removesuffix("s")
        owners = (
            [each for each in owners if each.endswith(f".{place}")]
            or [each for each in owners if section and each.startswith(section)]
            or owners
        )
        meant = [{f"correction.{each}.{name}": one for name, one in given.items()} for each in owners]
        if meant:
            key, single = f"correction.{place}", len(meant) == 1
            raise SpecError(
                "unknown key.",
                f"Did you mean {' or '.join(' and '.join(each) for each in meant)}?",
                key=key,
                value=value,
                proposed=meant[0] if single else None,
                removed={key: value} if single else None,
            )


def _read_whole_weight(value: Any) -> WeightSpec | None:
    if value is None:
        return None
    key = "correction.weight"
    fix = "Choose an option that has a weight, such as tis_token, in correction=[...]."
    given = require_mapping(value, key, fix, None)
    for name in ("when", "sign"):
        if name in given:
            raise SpecError(
                "weight applies to every token.",
                f"Set the weight as correction.weights.<name>, with {name}, or remove {name}.",
                key=f"{key}.{name}",
                value=given[name],
                meant={"correction.weights.signed": dict(given), key: None},
            )
    return read_weight(given, key)


def _read_named_weight(mapping: Mapping[str, Any], key: str) -> WeightSpec:
    if mapping.get("when", "???") == "???":
        fix = f"Set {key}.when=negative, positive or any, to select the tokens that it weights by their advantage."
        proposed = {"when": "negative"}
        raise SpecError.under(key, "when", "???", "this key is not set and has no default.", fix, proposed=proposed)
    return read_weight(mapping, key)


T = TypeVar("T")


def _read_named(
    mapping: Mapping[str, Any], section: str, example: str, read: Callable[[Mapping[str, Any], str], T]
) -> tuple[tuple[str, T], ...]:
    whole, fix = (
        f"correction.{section}",
        f"Choose an option that has {section}, such as {example}, in correction=[...].",
    )
    given = mapping.get(section)
    parts = require_mapping({} if given is None else given, whole, fix, {})
    return tuple(
        (check_metric_name(name, whole, part), read(require_mapping(part, f"{whole}.{name}", fix), f"{whole}.{name}"))
        for name, part in sorted((str(name), part) for name, part in parts.items())
    )


def _read_term(mapping: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any]], T], example: str) -> T | None:
    if (value := mapping.get(name)) is None:
        return None
    fix = f"Choose an option that sets it, such as {example}, in correction=[...]."
    return read(require_mapping(value, f"correction.{name}", fix, None))


NOT_SET = "not set"
_DIGITS = 6


def format_bounds(bounds: Mapping[str, float | None]) -> str:
    """Format the bounds of a mask or a weight.

    Args:
        bounds: the bounds that exist among ``lower``, ``upper``, ``delta`` and ``budget``; None is an open side.
            ``delta`` and ``budget`` replace lower and upper, and are shown alone.

    Returns:
        The text; ``not set`` if no bound has a value.

    Example:
        >>> format_bounds({"lower": 0.99, "upper": 1.01}), format_bounds({"lower": None, "upper": 2.0})
        ('[0.99, 1.01]', '<= 2')
        >>> format_bounds({"lower": 0.904837, "upper": None, "delta": 0.1})
        'delta=0.1'
    """
    for name in ("delta", "budget"):
        if (value := bounds.get(name)) is not None:
            return f"{name}={_format_number(value)}"
    lower, upper = bounds.get("lower"), bounds.get("upper")
    if lower is not None and upper is not None:
        return f"[{_format_number(lower)}, {_format_number(upper)}]"
    if upper is not None:
        return f"<= {_format_number(upper)}"
    return NOT_SET if lower is None else f">= {_format_number(lower)}"


def _format_number(value: float) -> str:
    """Format a number with six digits, or with more if it is close to 1 and would otherwise be shown as 1."""
    texts = (f"{value:.{digits}g}" for digits in range(_DIGITS, 18))
    return next(text for text in texts if (float(text) == 1) == (value == 1))


Bounds = Mapping[str, float | None]
"""Maps each bound key of a part to its value: ``lower`` and ``upper``, or ``delta``; a weight has only ``upper``."""
Side = Literal["both", "upper", "lower"]
"""Selects the bounds of a part that move."""
WEIGHT: Final = "correction.weight"
"""Name of the weight in lists of mask names, which never contain a dot."""
MOVES = "moves"
"""Placeholder for a moving bound in the structure; an open side stays null."""


def read_bounds(spec: CorrectionSpec, names: Collection[str]) -> dict[str, dict[str, float | None]]:
    """Read the bounds of the masks in ``names`` that the spec contains, and the weight's cap under the name ``WEIGHT``.

    Example:
        >>> from .weights import WeightSpec
        >>> tis = CorrectionSpec(weight=WeightSpec("token", "truncate", None, 2.0))
        >>> read_bounds(tis, [WEIGHT])[WEIGHT]
        {'upper': 2.0}
    """
    found = {name: _bounds(mask.to_mapping()) for name, mask in spec.masks if name in names}
    if spec.weight is not None and WEIGHT in names:
        found[WEIGHT] = {"upper": spec.weight.upper}
    return found


def replace_bounds(spec: CorrectionSpec, bounds: Mapping[str, Bounds]) -> CorrectionSpec:
    """Build a copy of the spec with these bounds, keyed by mask name; the key ``WEIGHT`` sets the weight's bounds.

    Raises:
        KeyError: the spec has no such part.
        SpecError: a part cannot have these bounds.

    Example:
        >>> from .weights import WeightSpec
        >>> tis = CorrectionSpec(weight=WeightSpec("token", "truncate", None, 2.0))
        >>> replace_bounds(tis, {WEIGHT: {"upper": 3.0}}).weight.upper
        3.0
    """
    there = {name for name, _ in spec.masks} | (set() if spec.weight is None else {WEIGHT})
    if unknown := set(bounds) - there:
        raise KeyError(f"bounds were given for {', '.join(sorted(unknown))}, but the correction has no such part")
    masks = tuple(
        (name, read_mask(mask.to_mapping() | dict(bounds.get(name, {})), f"correction.masks.{name}"))
        for name, mask in spec.masks
    )
    weight = spec.weight
    if weight is not None and WEIGHT in bounds:
        weight = read_weight(weight.to_mapping() | dict(bounds[WEIGHT]))
    return spec if (weight, masks) == (spec.weight, spec.masks) else replace(spec, weight=weight, masks=masks)


def compute_fingerprint(spec: CorrectionSpec, names: Collection[str]) -> int:
    """Compute ``CorrectionSpec.fingerprint`` without the moving bounds of the parts in ``names``.

    Example:
        >>> from .weights import WeightSpec
        >>> narrow, wide = (CorrectionSpec(weight=WeightSpec("token", "truncate", None, cap)) for cap in (2.0, 3.0))
        >>> compute_fingerprint(narrow, [WEIGHT]) == compute_fingerprint(wide, [WEIGHT])
        True
        >>> compute_fingerprint(narrow, []) == compute_fingerprint(wide, [])
        False
    """
    if not names:
        return spec.fingerprint()
    mapping = spec.to_mapping()
    for name in names:
        if name == WEIGHT:
            mapping["weight"]["upper"] = MOVES
            continue
        mask = mapping["masks"][name]
        mask.update({key: MOVES for key, value in _bounds(mask).items() if value is not None})
    return _hash(mapping)


def format_part_path(name: str) -> str:
    """Format the path of a weight or mask under ``correction``.

    Example:
        >>> format_part_path("gsm"), format_part_path(WEIGHT)
        ('masks.gsm', 'weight')
    """
    return "weight" if name == WEIGHT else f"masks.{name}"


def _bounds(mapping: Mapping[str, Any]) -> dict[str, float | None]:
    return {key: mapping[key] for key in ("lower", "upper", "delta") if key in mapping}
