"""Parts of a correction, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .mask_spec import MaskSpec
from .proximal import Proximal
from .units import Level
from .weight_spec import WeightSpec

Denominator = Literal["original", "kept"]
Baseline = Literal["include", "exclude"]


@dataclass(frozen=True)
class CorrectionParts:
    """A weight, masks that must all keep, and the options around them.

    Attributes:
        weight: importance weight, or None for 1.
        masks: (name, mask) in name order; the order never matters to the result.
        proximal: where pi_old comes from, see ``proximal_log_prob``.
        alpha: with ``proximal=loglinear``: the share of pi, in (0, 1).
        denominator: of the loss: ``original`` counts rejected tokens and rows, ``kept`` does not.
        baseline: ``include`` or ``exclude`` rejected siblings in the group baselines of GRPO, RLOO and OPO.
        kl_clip: (lower, upper) on pi / pi_old in the KL loss, or None for verl's own KL loss.
        skyrl_compat: reproduces SkyRL, where an outlier mask acts first, then token masks, and what decides by
            sequence sees only the tokens that these leave.
        allow_truncated_sampling: allow top-p, top-k, min-p and repetition penalties, under which mu is another
            distribution than the one that pi_old is compared with.
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

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values from which ``from_mapping`` builds an equal spec."""
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

    @property
    def is_none(self) -> bool:
        """True if nothing is corrected."""
        # The other options act through a weight or a mask alone, see rules.check_together.
        return self.weight is None and not self.masks and self.proximal == "recompute" and self.kl_clip is None

    @property
    def levels(self) -> frozenset[Level]:
        """Levels that the weight or a mask decides by."""
        used: set[Level] = {mask.level for _, mask in self.masks}
        return frozenset(used | ({self.weight.level} if self.weight else set()))

    @property
    def age_parts(self) -> dict[str, WeightSpec | MaskSpec]:
        """Parts that depend on the age of the weights that sampled a token, by key below ``correction``."""
        parts: dict[str, WeightSpec | MaskSpec] = {
            f"masks.{name}": mask for name, mask in self.masks if mask.entry.of_age or mask.by_staleness is not None
        }
        if self.weight is not None and self.weight.by_staleness is not None:
            parts["weight"] = self.weight
        return parts

    @property
    def needs_constants(self) -> bool:
        """True if a part needs batch-level constants, see ``batch_constants``."""
        normalized = self.weight is not None and self.weight.normalize
        return normalized or any(mask.budget is not None for _, mask in self.masks)

    @property
    def needs_batch(self) -> bool:
        """True if a part reads the whole batch before the first gradient step."""
        return self.needs_constants or self.denominator == "kept" or self.baseline == "exclude"

    @property
    def step_parts(self) -> tuple[str, ...]:
        """Keys, below ``correction``, of the parts that need the current policy or the advantages."""
        parts = [f"masks.{name}" for name, mask in self.masks if mask.needs_step]
        return tuple((["weight"] if self.weight is not None and self.weight.needs_step else []) + parts)

    @property
    def rollout_rejects(self) -> tuple[str, ...]:
        """Keys, below ``correction``, of the parts that can drop tokens by mu and pi_old alone."""
        parts = [f"masks.{name}" for name, mask in self.masks if not mask.needs_step]
        rejects = self.weight is not None and self.weight.kind == "reject" and not self.weight.needs_step
        return tuple((["weight"] if rejects else []) + parts)
