"""Converters from our plain values to the configuration keys of SkyRL, TRL and verl.

Parts that the framework cannot express raise ``SpecError`` with our own key, so that nothing is silently omitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from ..correction_parts import CorrectionParts
from ..masks import MaskSpec
from ..problem import SpecError
from ..weights import WeightSpec
from .loss_sections import SKYRL_DEFAULTS
from .verl import VERL_DEFAULTS, VERL_REJECTIONS

_AROUND: Final = {
    "weights": "it has the same weight for every advantage",
    "alpha": "it does not interpolate between policies",
    "denominator": "it has its own denominator",
    "nonfinite": "it has its own denominator",
    "baseline": "its baselines are computed before the correction",
    "kl_clip": "its KL loss has no clip",
    "kl_weight": "its KL loss is set elsewhere, in TRL by beta and use_bias_correction_kl",
    "penalty": "it has no additional term like the penalty",
    "centering": "its known releases have no key for score centering",
    "support": "it does not replay the support of truncated sampling",
}
"""Maps each key that none of the three frameworks can express to the reason."""


def build_skyrl(spec: CorrectionParts) -> dict[str, Any]:
    """Build SkyRL's ``off_policy_correction`` for ``spec``, without keys that have their default values.

    Raises:
        SpecError: names the part that SkyRL cannot express.

    Example:
        >>> from ..weights import WeightSpec
        >>> build_skyrl(CorrectionParts(weight=WeightSpec("token", "truncate", None, 2.0)))
        {'tis_ratio_type': 'token'}
    """
    name = "SkyRL"
    _check_around(spec, name, proximal=("recompute",))
    values: dict[str, Any] = {}
    weight = spec.weight
    if weight is not None:
        _check_weight(weight, name, kinds=("truncate",))
        upper = _get_upper(weight, name)
        if weight.lower is not None:
            _fail("weight.lower", weight.lower, name, "truncates only from above")
        values |= {"tis_ratio_type": weight.level, f"{weight.level}_tis_ratio_clip_high": upper}
    stems: dict[str, str] = {}
    for key, mask in _list_masks(spec, name, ratio="rollout"):
        stem = _find_skyrl_stem(key, mask)
        if stem in stems:
            _fail(key, mask.to_mapping(), name, f"has only one such mask, already used by {stems[stem]}")
        if {"geo_mask", "product_mask"} <= {*stems, stem}:
            _fail(key, mask.to_mapping(), name, "masks sequences by only one metric")
        stems[stem] = key
        values |= {f"{stem}_low": mask.lower, f"{stem}_high": mask.upper}
        if stem in ("geo_mask", "product_mask"):
            values["sequence_mask_metric"] = "geometric" if stem == "geo_mask" else "product"
    ordered = "token_mask_is_threshold" in stems and (
        "sequence_mask_metric" in values or values.get("tis_ratio_type") == "sequence"
    )
    if ordered != spec.skyrl_compat:
        why = "applies its token mask before parts by sequence" if ordered else "has no order of these parts"
        _fail("skyrl_compat", spec.skyrl_compat, name, why)
    return {key: value for key, value in values.items() if value != SKYRL_DEFAULTS[key]}


def _find_skyrl_stem(key: str, mask: MaskSpec) -> str:
    shapes = {
        ("sequence", "any"): "outlier_token_is_threshold",
        ("token", "product"): "token_mask_is_threshold",
        ("token", "any"): "token_mask_is_threshold",
        ("sequence", "geometric"): "geo_mask",
        ("sequence", "product"): "product_mask",
    }
    stem = shapes.get((mask.level, mask.aggregate))
    if stem is None:
        _fail(key, mask.to_mapping(), "SkyRL", "has no such mask")
    if stem != "outlier_token_is_threshold" and None in (mask.lower, mask.upper):
        _fail(key, mask.to_mapping(), "SkyRL", "bounds this mask on both sides")
    return stem


def build_trl(spec: CorrectionParts) -> dict[str, Any]:
    """Build all correction fields of TRL's ``GRPOConfig`` for ``spec``; needs TRL 1.6.0 or later.

    ``use_bias_correction_kl`` is false, because here a KL term is weighted only if ``kl_weight`` is set. ``kl_weight``
    itself is rejected, because TRL weights only a KL term with coefficient ``beta``, and a correction has no such
    coefficient.

    Raises:
        SpecError: names the part that TRL cannot express.

    Example:
        >>> build_trl(CorrectionParts())["vllm_importance_sampling_correction"]
        False
    """
    name, stem = "TRL", "vllm_importance_sampling"
    _check_around(spec, name, proximal=("recompute",))
    if spec.skyrl_compat:
        _fail("skyrl_compat", True, name, "has no order of masks")
    weight, threshold = spec.weight, None
    values: dict[str, Any] = {f"{stem}_correction": weight is not None}
    if weight is not None:
        _check_weight(weight, name, kinds=("truncate", "clip", "reject"))
        action = "mask" if weight.kind == "reject" else "truncate"
        if weight.lower is None:
            _get_upper(weight, name)
        values[f"{stem}_mode"] = f"{weight.level}_{action}"
        values |= {f"{stem}_clip_max": weight.upper, f"{stem}_clip_min": weight.lower}
    for key, mask in spec.masks:
        if mask.delta is None or mask != MaskSpec(
            "full", "sequence", "geometric", mask.lower, None, "negative", delta=mask.delta
        ):
            _fail(f"masks.{key}", mask.to_mapping(), name, "has only off-policy sequence masking, by pi / mu and delta")
        if threshold is not None:
            _fail(f"masks.{key}", mask.to_mapping(), name, "has one such mask")
        threshold = mask.delta
    values |= {"off_policy_mask_threshold": threshold, "use_bias_correction_kl": False}
    # Without ``use_vllm``, TRL has no mu.
    return values | ({"use_vllm": True} if weight is not None or threshold is not None else {})


def build_verl(spec: CorrectionParts) -> dict[str, Any]:
    """Build verl's ``algorithm.rollout_correction`` for ``spec``, without keys that have their default values.

    A weight on pi / mu becomes ``loss_type=reinforce``, for which verl needs bypass mode.

    Raises:
        SpecError: names the part that verl cannot express.

    Example:
        >>> from ..weights import WeightSpec
        >>> build_verl(CorrectionParts(weight=WeightSpec("token", "reject", 0.5, 2.0)))
        {'rollout_is': 'token', 'rollout_is_threshold': '0.5_2.0'}
    """
    name = "verl"
    _check_around(spec, name, proximal=("recompute", "bypass"))
    if spec.skyrl_compat:
        _fail("skyrl_compat", True, name, "has no order of masks")
    bypass = spec.proximal == "bypass"
    ratio, values = "full" if bypass else "rollout", dict(VERL_DEFAULTS)
    values["bypass_mode"] = bypass
    weight = spec.weight
    if weight is not None:
        _check_weight(weight, name, kinds=("truncate", "reject"), ratio=ratio)
        upper = _get_upper(weight, name)
        if (weight.kind == "truncate") != (weight.lower is None):
            _fail("weight.lower", weight.lower, name, "can only cap a weight from above, or reject outside two bounds")
        band = f"{weight.lower!r}_{upper!r}"
        values |= {"rollout_is": weight.level, "rollout_is_batch_normalize": weight.normalize}
        values["rollout_is_threshold"] = band if weight.kind == "reject" else _write_cap(upper)
        values["loss_type"] = "reinforce" if bypass else "ppo_clip"
    options = {shape: option for option, shape in VERL_REJECTIONS.items()}
    thresholds: dict[str, str] = {}
    for key, mask in _list_masks(spec, name, ratio=ratio):
        option = options.get((mask.level, mask.aggregate))
        if option is None:
            _fail(key, mask.to_mapping(), name, "has no such rejection")
        if option in thresholds:
            _fail(key, mask.to_mapping(), name, f"has {option} only once")
        thresholds[option] = _write_threshold(option, key, mask)
    if thresholds:
        values["rollout_rs"] = ",".join(thresholds)
        values["rollout_rs_threshold"] = ",".join(thresholds.values())
    return {key: value for key, value in values.items() if value != VERL_DEFAULTS[key]}


def _write_cap(upper: float) -> float | str:
    # This must be a string, because our reader of verl's keys treats a number below 1 as a mistyped pair of bounds.
    return upper if upper >= 1 else repr(upper)


def _write_threshold(option: str, key: str, mask: MaskSpec) -> str:
    if not option.endswith("k1"):
        if mask.lower is not None or mask.upper is None:
            _fail(key, mask.to_mapping(), "verl", f"can bound {option} only from above")
        return repr(mask.upper)
    if mask.lower is None or mask.upper is None:
        _fail(key, mask.to_mapping(), "verl", f"bounds {option} on both sides")
    # verl bounds mu / pi_old.
    return f"{1 / mask.upper!r}_{1 / mask.lower!r}"


def _check_around(spec: CorrectionParts, name: str, *, proximal: tuple[str, ...]) -> None:
    plain, usual = spec.to_mapping(), CorrectionParts().to_mapping()
    for key, why in _AROUND.items():
        if plain.get(key) != usual.get(key):
            raise SpecError(f"{name} cannot express this: {why}.", key=f"correction.{key}", value=plain[key])
    if spec.proximal not in proximal:
        _fail("proximal", spec.proximal, name, f"takes pi_old by {' or '.join(proximal)}")
    if spec.allow_truncated_sampling:
        _fail("allow_truncated_sampling", True, name, "does not check the sampling parameters")


def _check_weight(weight: WeightSpec, name: str, *, kinds: tuple[str, ...], ratio: str = "rollout") -> None:
    known = {"level": ("token", "sequence"), "kind": kinds, "aggregate": ("product",), "ratio": (ratio,)}
    for key, allowed in known.items():
        if (value := getattr(weight, key)) not in allowed:
            _fail(f"weight.{key}", value, name, f"has {' and '.join(allowed)}")
    if weight.normalize and name != "verl":
        _fail("weight.normalize", True, name, "does not divide by the batch's mean")
    if weight.normalize and ratio == "full":
        _fail("weight.normalize", True, name, "divides pi / mu by each micro-batch's own mean")
    if weight.by_staleness is not None:
        _fail("weight.by_staleness", list(weight.by_staleness), name, "does not use the age of a token")


def _get_upper(weight: WeightSpec, name: str) -> float:
    if weight.upper is None:
        _fail("weight.upper", None, name, "bounds every weight")
    return weight.upper


def _list_masks(spec: CorrectionParts, name: str, *, ratio: str) -> list[tuple[str, MaskSpec]]:
    """List the masks on this ratio that apply to any advantage, with their keys; raise an error for any other mask."""
    found = []
    for own, mask in spec.masks:
        key = f"masks.{own}"
        if mask.entry.of_age or mask.by_staleness is not None:
            _fail(key, mask.to_mapping(), name, "does not use the age of a token")
        if mask.when != "any":
            _fail(f"{key}.when", mask.when, name, "does not distinguish advantages")
        if mask.ratio != ratio:
            _fail(f"{key}.ratio", mask.ratio, name, f"masks on {ratio} here")
        if mask.budget is not None:
            _fail(f"{key}.budget", mask.budget, name, "has no cutoff for a batch")
        if mask.delta is not None and not math.isfinite(mask.limits[1]):
            _fail(f"{key}.delta", mask.delta, name, "bounds ratios on both sides")
        found.append((key, mask))
    return found


def _fail(key: str, value: Any, name: str, why: str) -> NoReturn:
    plain = dict(value) if isinstance(value, Mapping) else value
    raise SpecError(f"{name} cannot express this: it {why}.", key=f"correction.{key}", value=plain)
