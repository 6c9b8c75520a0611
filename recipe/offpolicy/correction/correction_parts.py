"""The parts of a correction, and properties that can be derived from these parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .mask_spec import MaskSpec
from .problem import SpecError
from .proximal import BY_AGE, MU_ITSELF, Alpha, Proximal
from .terms import KlWeightSpec, PenaltySpec
from .units import Level
from .validation import compute_derived, read_choice, read_number
from .weights import WeightSpec

Denominator = Literal["original", "kept"]
Nonfinite = Literal["counted", "excluded"]
Baseline = Literal["include", "exclude"]
Support = Literal["engine"]
SupportUnknown = Literal["mask", "full"]


@dataclass(frozen=True)
class CorrectionParts:
    """A weight, masks, and their options; a token is kept if all masks keep it.

    Attributes:
        weight: importance weight of every token, or None for 1.
        weights: (name, weight) in name order, each for the tokens that its ``when`` and ``sign`` select. No token has
            two weights, and a token that no weight selects has weight 1. Empty if ``weight`` is set.
        penalty: penalty on the squared log-ratio of every valid token, added to the policy term; None for no penalty.
        kl_weight: importance weight of the KL loss, or None for 1; excludes ``kl_clip``.
        nonfinite: whether tokens whose mu is not finite are ``counted`` in the loss's denominator, although they add
            nothing to the loss, or ``excluded`` from the denominator.
        masks: (name, mask) in name order; the order never affects the result.
        proximal: source of pi_old, see ``proximal_log_prob``.
        alpha: with ``proximal=loglinear``, the weight of log pi, in (0, 1); ``by_age`` computes this weight from each
            token's age.
        denominator: denominator of the loss: ``original`` counts rejected tokens and rows, ``kept`` does not.
        baseline: whether the group baselines of GRPO, RLOO and OPO ``include`` or ``exclude`` rejected siblings.
        kl_clip: bounds (lower, upper) on pi / pi_old in the KL loss, or None for verl's own KL loss.
        skyrl_compat: reproduces SkyRL's order: an outlier mask acts first, then token masks, and parts that decide by
            sequence read only the tokens that these masks keep.
        allow_truncated_sampling: allow top-p, top-k, min-p and repetition penalties, under which mu and pi_old are
            normalised over different tokens.
        support: ``engine``: pi_old and pi are renormalised, like mu, over the tokens that the rollout engine allowed;
            None: they are normalised over the whole vocabulary.
        support_unknown: treatment of tokens whose support has more members than were requested from the engine:
            ``mask`` removes them from the policy term, ``full`` computes their log-probs over the whole vocabulary.
        support_size: number of support members requested from the engine for each token; None: top-k determines it.
        support_min_p: min-p of each request (verl has no key for it); None for no min-p.
        centering: K of score centering, see ``correction.centering``; None for no centering.
    """

    weight: WeightSpec | None = None
    masks: tuple[tuple[str, MaskSpec], ...] = ()
    proximal: Proximal = "recompute"
    alpha: Alpha | None = None
    denominator: Denominator = "original"
    baseline: Baseline = "include"
    kl_clip: tuple[float, float] | None = None
    skyrl_compat: bool = False
    allow_truncated_sampling: bool = False
    weights: tuple[tuple[str, WeightSpec], ...] = ()
    penalty: PenaltySpec | None = None
    nonfinite: Nonfinite = "counted"
    kl_weight: KlWeightSpec | None = None
    support: Support | None = None
    support_unknown: SupportUnknown = "mask"
    support_size: int | None = None
    support_min_p: float | None = None
    centering: int | None = None

    def __post_init__(self) -> None:
        compute_derived(self)

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values from which ``from_mapping`` builds an equal spec."""
        mapping: dict[str, Any] = {
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
        # Unset keys are left out, so that the fingerprints of corrections that do not use them stay the same.
        if self.penalty is not None:
            mapping["penalty"] = self.penalty.to_mapping()
        if self.kl_weight is not None:
            mapping["kl_weight"] = self.kl_weight.to_mapping()
        if self.nonfinite != "counted":
            mapping["nonfinite"] = self.nonfinite
        if self.weights:
            mapping["weights"] = {name: {"when": "any", **weight.to_mapping()} for name, weight in self.weights}
        if self.support is not None:
            mapping["support"] = self.support
            mapping["support_unknown"] = self.support_unknown
            mapping["support_size"] = self.support_size
            mapping["support_min_p"] = self.support_min_p
        if self.centering is not None:
            mapping["centering"] = self.centering
        return mapping

    @cached_property
    def is_none(self) -> bool:
        """True if nothing is corrected."""
        # The other options act only through a weight or a mask, see rules.check_together.
        terms = self.kl_clip or self.kl_weight or self.penalty or self.centering
        return not (self.all_weights or self.masks or terms) and self.proximal == "recompute"

    @cached_property
    def reads_mu(self) -> bool:
        """True if any part that affects the gradient reads the behaviour policy's log-probs."""
        masks = any(mask.ratio != "ppo" and not mask.entry.of_age for _, mask in self.masks)
        terms = any(each is not None and each.ratio == "full" for each in (self.penalty, self.kl_weight))
        centered = self.centering is not None
        return bool(self.all_weights) or masks or terms or centered or self.proximal in (*MU_ITSELF, "loglinear")

    @cached_property
    def recounts(self) -> bool:
        """True if the loss divides by counts of tokens and rows that differ from the base loss's."""
        return self.denominator == "kept" or self.nonfinite == "excluded"

    @cached_property
    def all_weights(self) -> dict[str, WeightSpec]:
        """Weights by key under ``correction``: ``weight``, or each of ``weights``."""
        one = {} if self.weight is None else {"weight": self.weight}
        return one | {f"weights.{name}": weight for name, weight in self.weights}

    @cached_property
    def normalized(self) -> WeightSpec | None:
        """The weight that is divided by its mean over the batch; None if there is none."""
        return next((weight for weight in self.all_weights.values() if weight.normalize), None)

    @cached_property
    def weighs_full_ratio(self) -> bool:
        """True if a weight is applied to pi / mu; the base loss then has no ratio of its own."""
        return any(weight.ratio == "full" for weight in self.all_weights.values())

    @cached_property
    def weight_rejects(self) -> bool:
        """True if a weight drops units outside its bounds."""
        return any(weight.kind == "reject" for weight in self.all_weights.values())

    @cached_property
    def levels(self) -> frozenset[Level]:
        """Levels at which the weight or a mask decides."""
        used: set[Level] = {mask.level for _, mask in self.masks}
        return frozenset(used | {weight.level for weight in self.all_weights.values()})

    @cached_property
    def needs_turns(self) -> bool:
        """True if a part decides by turn, or applies only after a tool's result."""
        parts: list[WeightSpec | MaskSpec] = [*self.all_weights.values(), *(mask for _, mask in self.masks)]
        return any(part.level == "turn" or part.when == "post_tool" for part in parts)

    @cached_property
    def age_parts(self) -> dict[str, WeightSpec | MaskSpec]:
        """Parts, by key under ``correction``, that depend on the age of the weights that sampled a token."""
        parts: dict[str, WeightSpec | MaskSpec] = {
            f"masks.{name}": mask for name, mask in self.masks if mask.entry.of_age or mask.by_staleness is not None
        }
        return parts | {key: weight for key, weight in self.all_weights.items() if weight.by_staleness is not None}

    @cached_property
    def age_keys(self) -> tuple[str, ...]:
        """Keys under ``correction`` whose values depend on the age of the weights."""
        return (*self.age_parts, *(("alpha",) if self.alpha == BY_AGE else ()))

    @cached_property
    def reads_token_versions(self) -> bool:
        """True if a part depends on the version of the weights that sampled each token."""
        return "version" in self.levels or bool(self.age_keys)

    @cached_property
    def needs_constants(self) -> bool:
        """True if a part needs batch-level constants, see ``batch_constants``."""
        return self.normalized is not None or any(mask.budget is not None for _, mask in self.masks)

    @cached_property
    def needs_batch(self) -> bool:
        """True if a part reads the whole batch before the first gradient step."""
        return self.needs_constants or self.recounts or self.baseline == "exclude"

    @cached_property
    def step_parts(self) -> tuple[str, ...]:
        """Keys, under ``correction``, of the parts that need the current policy or the advantages."""
        parts = [f"masks.{name}" for name, mask in self.masks if mask.needs_step]
        return tuple([key for key, weight in self.all_weights.items() if weight.needs_step] + parts)

    @cached_property
    def rollout_rejects(self) -> tuple[str, ...]:
        """Keys, under ``correction``, of the parts that can drop tokens based only on mu and pi_old."""
        parts = [f"masks.{name}" for name, mask in self.masks if not mask.needs_step]
        weights = self.all_weights.items()
        rejecting = [key for key, weight in weights if weight.kind == "reject" and not weight.needs_step]
        return tuple(rejecting + parts)


KEYS = ("support", "support_unknown", "support_size", "support_min_p")


def read_support(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Read the ``support`` fields from the plain values under ``correction``.

    Raises:
        SpecError: a malformed value, or a value that nothing reads.

    Example:
        >>> read_support({"support": "engine", "support_size": 8})
        {'support': 'engine', 'support_unknown': 'mask', 'support_size': 8, 'support_min_p': None}
    """
    support = mapping.get("support")
    if support is not None:
        read_choice(mapping, "support", ("engine",), "correction")
    fields = {
        "support": support,
        "support_unknown": read_choice(mapping, "support_unknown", SupportUnknown, "correction", "mask"),
        "support_size": _read_size(mapping.get("support_size")),
        "support_min_p": _read_min_p(mapping.get("support_min_p")),
    }
    unread = {"support_unknown": "mask", "support_size": None, "support_min_p": None}
    for name, off in unread.items() if support is None else ():
        if fields[name] != off:
            raise SpecError(
                "read only with correction.support=engine.",
                f"Set correction.support=engine, or correction.{name}={'null' if off is None else off}.",
                key=f"correction.{name}",
                value=fields[name],
                proposed={"correction.support": "engine"},
            )
    return fields


def _read_size(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise SpecError(
        "expected a number of tokens, 1 or more, or null to derive it from top-k.",
        "Set correction.support_size=null for example.",
        key="correction.support_size",
        value=value,
        proposed={"correction.support_size": None},
    )


def _read_min_p(value: Any) -> float | None:
    number = read_number(value, "correction.support_min_p")
    if number is not None and not 0 < number < 1:
        raise SpecError(
            "a share of the likeliest token's probability, above 0 and below 1.",
            "Set correction.support_min_p=0.1 for example, or null for none.",
            key="correction.support_min_p",
            value=number,
            proposed={"correction.support_min_p": 0.1},
        )
    return number
