"""What a correction is: one weight, any number of named masks, and what surrounds them; validated once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .dialects.skyrl import plain_from_skyrl
from .dialects.trl import plain_from_trl
from .dialects.verl import plain_from_verl
from .mask_spec import MaskSpec
from .proximal import Proximal
from .rules import check_together
from .units import Level
from .validation import (
    SpecError,
    choice,
    known_keys,
    mapping_at,
    metric_name,
    number,
    ratio_bounds,
    require_keys,
    truth,
)
from .weight_spec import WeightSpec

Denominator = Literal["original", "kept"]
Baseline = Literal["include", "exclude"]

_KEYS = (
    "weight",
    "masks",
    "proximal",
    "alpha",
    "denominator",
    "baseline",
    "kl_clip",
    "skyrl_compat",
    "allow_truncated_sampling",
)


@dataclass(frozen=True)
class CorrectionSpec:
    """A weight, masks that must all keep, and what surrounds them.

    Attributes:
        weight: importance weight, or None for 1.
        masks: (name, mask) in name order; the order never matters to the result.
        proximal: where pi_old comes from, see ``proximal_log_prob``.
        alpha: with ``proximal=loglinear``: the share of pi, in (0, 1).
        denominator: what the loss is divided by: ``original`` counts rejected tokens and rows, ``kept`` does not.
        baseline: whether rejected siblings count in the group baselines of GRPO, RLOO and OPO.
        kl_clip: (lower, upper) on pi / pi_old in the KL loss, or None for verl's own KL loss.
        skyrl_compat: reproduces SkyRL, where an outlier mask acts first, then token masks, and what decides by
            sequence sees only the tokens that these leave.
        allow_truncated_sampling: says that top-p, top-k, min-p or a repetition penalty is meant, although
            mu is then another distribution than the one pi_old is compared with.
    """

    weight: WeightSpec | None = None
    masks: tuple[tuple[str, MaskSpec], ...] = ()
    proximal: Proximal = "recompute"
    alpha: float | None = None
    denominator: Denominator = "original"
    baseline: Baseline = "include"
    kl_clip: tuple[float, float] | None = None
    skyrl_compat: bool = False
    allow_truncated_sampling: bool = False

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> CorrectionSpec:
        """Build from the plain values under the Hydra key ``correction``.

        Raises:
            SpecError: a malformed value, or parts that cannot go together.
        """
        if not isinstance(mapping, Mapping):
            shown = "null" if mapping is None else repr(mapping)
            raise SpecError(
                f"correction={shown}: expected a mapping with the keys weight and masks. "
                f"Set correction=none to train uncorrected."
            )
        known_keys(mapping, _KEYS, "correction")
        weight, masks = mapping.get("weight"), mapping.get("masks")
        spec = cls(
            weight=None if weight is None else WeightSpec.from_mapping(mapping_at(weight, "correction.weight")),
            masks=tuple(
                (metric_name(name, "correction.masks", mask), MaskSpec.from_mapping(mapping_at(mask, key), key=key))
                for name, mask, key in sorted(
                    (str(n), m, f"correction.masks.{n}")
                    for n, m in mapping_at({} if masks is None else masks, "correction.masks").items()
                )
            ),
            proximal=choice(mapping, "proximal", Proximal, "correction", "recompute"),
            alpha=number(mapping.get("alpha"), "correction.alpha"),
            denominator=choice(mapping, "denominator", Denominator, "correction", "original"),
            baseline=choice(mapping, "baseline", Baseline, "correction", "include"),
            kl_clip=_kl_clip(mapping.get("kl_clip")),
            skyrl_compat=truth(mapping, "skyrl_compat", "correction"),
            allow_truncated_sampling=truth(mapping, "allow_truncated_sampling", "correction"),
        )
        check_together(spec)
        return spec

    @classmethod
    def from_skyrl(cls, mapping: Mapping[str, Any]) -> CorrectionSpec:
        """From SkyRL's ``trainer.algorithm.off_policy_correction``; keys left out have SkyRL's defaults."""
        return cls.from_mapping(plain_from_skyrl(mapping))

    @classmethod
    def from_trl(cls, mapping: Mapping[str, Any]) -> CorrectionSpec:
        """From the fields of TRL's ``GRPOConfig`` about the sampling engine; those left out have TRL's defaults."""
        return cls.from_mapping(plain_from_trl(mapping))

    @classmethod
    def from_verl(cls, mapping: Any) -> CorrectionSpec:
        """From verl's ``algorithm.rollout_correction``; keys left out have the defaults of verl's YAML."""
        return cls.from_mapping(plain_from_verl(mapping))

    def to_mapping(self) -> dict[str, Any]:
        """Plain values from which ``from_mapping`` makes an equal spec."""
        return {
            "weight": None if self.weight is None else self.weight.to_mapping(),
            "masks": {name: mask.to_mapping() for name, mask in self.masks},
            "proximal": self.proximal,
            "alpha": self.alpha,
            "denominator": self.denominator,
            "baseline": self.baseline,
            "kl_clip": None if self.kl_clip is None else dict(zip(("lower", "upper"), self.kl_clip, strict=True)),
            "skyrl_compat": self.skyrl_compat,
            "allow_truncated_sampling": self.allow_truncated_sampling,
        }

    def fingerprint(self) -> int:
        """An integer in [0, 2^31), equal for equal specs, in every process and release."""
        text = json.dumps(self.to_mapping(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    @property
    def is_none(self) -> bool:
        """Whether nothing is corrected."""
        return self.weight is None and not self.masks and self.proximal == "recompute" and self.kl_clip is None

    @property
    def levels(self) -> frozenset[Level]:
        """Levels that the weight or a mask decides by."""
        used: set[Level] = {mask.level for _, mask in self.masks}
        return frozenset(used | ({self.weight.level} if self.weight else set()))

    @property
    def needs_constants(self) -> bool:
        """Whether something is fixed for the whole batch, see ``batch_constants``."""
        normalized = self.weight is not None and self.weight.normalize
        return normalized or any(mask.budget is not None for _, mask in self.masks)

    @property
    def needs_batch(self) -> bool:
        """Whether anything has to be known of the whole batch before the first gradient step."""
        return self.needs_constants or self.denominator == "kept" or self.baseline == "exclude"

    @property
    def step_parts(self) -> tuple[str, ...]:
        """Keys, below ``correction``, of what waits for the current policy or the advantages."""
        parts = [f"masks.{name}" for name, mask in self.masks if mask.needs_step]
        return tuple((["weight"] if self.weight is not None and self.weight.needs_step else []) + parts)

    @property
    def rollout_rejects(self) -> tuple[str, ...]:
        """Keys, below ``correction``, of what can drop tokens by mu and pi_old alone."""
        parts = [f"masks.{name}" for name, mask in self.masks if not mask.needs_step]
        rejects = self.weight is not None and self.weight.kind == "reject" and not self.weight.needs_step
        return tuple((["weight"] if rejects else []) + parts)


def _kl_clip(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    key = "correction.kl_clip"
    mapping = mapping_at(value, key)
    known_keys(mapping, {"lower", "upper"}, key)
    bounds = {"lower": None, "upper": None, **mapping}
    require_keys(bounds, {"lower", "upper"}, key)
    lower, upper = ratio_bounds(bounds, key)
    if lower is None or upper is None or not lower < 1 < upper:
        raise SpecError(
            f"{key}={{lower: {lower}, upper: {upper}}}: a clip of pi / pi_old, two bounds around 1. "
            f"Set {key}.lower=0.8 and {key}.upper=1.2 for example, as PPO clips its ratio."
        )
    return lower, upper


__all__ = ["CorrectionSpec", "MaskSpec", "SpecError", "WeightSpec"]
