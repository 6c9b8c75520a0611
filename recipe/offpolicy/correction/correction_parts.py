"""The parts of a correction, properties derived from them, the source of pi_old, and the penalty's formula."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from .masks import MaskSpec
from .units import Level, Specification
from .weights import WeightSpec

Denominator = Literal["original", "kept"]
Nonfinite = Literal["counted", "excluded"]
Baseline = Literal["include", "exclude"]
Support = Literal["engine"]
SupportUnknown = Literal["mask", "full"]
KlRatio = Literal["full", "ppo"]
SUPPORT_KEYS = ("support", "support_unknown", "support_size", "support_min_p")

Proximal = Literal["recompute", "bypass", "reuse", "loglinear", "same_engine"]

Alpha = float | Literal["by_age"]
"""Weight of log pi in ``loglinear``: one number for all tokens, or a weight that depends on each token's age."""
BY_AGE: Literal["by_age"] = "by_age"
WITHOUT_FORWARD = ("bypass", "reuse", "loglinear")
"""Sources of pi_old that need no forward pass."""
OF_THE_TRAINER = ("recompute", "reuse")
"""Sources for which pi_old is the policy of the trainer's weights at the start of the step."""
TOLERANCE = 1e-6
"""Largest |log mu - log pi_old| allowed for a token with ``same_engine``, in nats; the resolution of float32 at a
log-prob of -8 is about 1e-6."""
MU_ITSELF = ("bypass", "same_engine")
"""Sources for which pi_old is mu, so pi_old / mu is 1."""


@dataclass(frozen=True)
class KlWeightSpec:
    """A ratio that multiplies each token's KL estimate in the loss; gradients flow through the ratio.

    Attributes:
        ratio: ``full`` pi / mu, ``ppo`` pi / pi_old.
        upper: limit, > 1; ratios above it are replaced with this constant. None for no limit.
    """

    ratio: KlRatio
    upper: float | None = None


@dataclass(frozen=True)
class PenaltySpec:
    """A penalty on (log r)^2 of every valid token. Weights and masks do not apply to it.

    This is the l2 term of Kimi k1.5 (Kimi Team 2025, eq. 3: coefficient tau / 2 on pi / mu). prime-rl calls it
    ``kl_tau``.

    Attributes:
        ratio: ``full`` pi / mu, ``ppo`` pi / pi_old.
        coefficient: factor > 0 on (log r)^2, which is aggregated over tokens as in the loss.
    """

    ratio: KlRatio
    coefficient: float


@dataclass(frozen=True)
class CorrectionParts(Specification):
    """The weight, masks and options of a correction. A token is kept only if all masks keep it.

    Attributes:
        weight: importance weight of every token, or None for 1.
        weights: (name, weight) in name order. Each weight applies to the tokens that its ``when`` and ``sign`` select.
            No token has two weights, and tokens that no weight selects have weight 1. Empty if ``weight`` is set.
        penalty: penalty on the squared log-ratio of every valid token, added to the policy term; None for no penalty.
        kl_weight: importance weight of the KL loss, or None for 1. It cannot be combined with ``kl_clip``.
        nonfinite: ``counted``: the loss's denominator includes tokens whose mu is not finite, although they add nothing
            to the loss. ``excluded``: the denominator excludes them.
        masks: (name, mask) in name order; the order never affects the result.
        proximal: source of pi_old, see ``proximal_log_prob``.
        alpha: with ``proximal=loglinear``, the weight of log pi, in (0, 1); ``by_age`` computes this weight from each
            token's age.
        denominator: denominator of the loss: ``original`` counts rejected tokens and rows, ``kept`` does not.
        baseline: whether the group baselines of GRPO, RLOO and OPO ``include`` or ``exclude`` rejected siblings.
        kl_clip: bounds (lower, upper) on pi / pi_old in the KL loss, or None for verl's own KL loss.
        skyrl_compat: apply masks in SkyRL's order, the outlier mask first and then token masks. Sequence-level parts
            then read only the tokens that these masks keep.
        allow_truncated_sampling: allow top-p, top-k, min-p and repetition penalties, under which mu and pi_old are
            normalised over different tokens.
        support: ``engine``: pi_old and pi are renormalised, like mu, over the tokens that the rollout engine allowed;
            None: they are normalised over the whole vocabulary.
        support_unknown: treatment of tokens whose support has more members than were requested from the engine:
            ``mask`` removes them from the policy term, ``full`` computes their log-probs over the whole vocabulary.
        support_size: number of support members requested from the engine for each token; None: top-k determines it.
        support_min_p: min-p to send with each request (verl has no key for it); None for no min-p.
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
        # Unset keys are left out, because the fingerprints of corrections that do not use them must stay the same.
        for name in ("penalty", "kl_weight"):
            if (term := getattr(self, name)) is not None:
                mapping[name] = asdict(term)
        if self.nonfinite != "counted":
            mapping["nonfinite"] = self.nonfinite
        if self.weights:
            mapping["weights"] = {name: {"when": "any", **weight.to_mapping()} for name, weight in self.weights}
        if self.support is not None:
            mapping |= {name: getattr(self, name) for name in SUPPORT_KEYS}
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
        other = self.centering is not None or self.proximal in (*MU_ITSELF, "loglinear")
        return bool(self.all_weights) or masks or terms or other

    @cached_property
    def recounts(self) -> bool:
        """True if the loss's token and row counts differ from those of the base loss."""
        return self.denominator == "kept" or self.nonfinite == "excluded"

    @cached_property
    def all_weights(self) -> dict[str, WeightSpec]:
        """Weights by key under ``correction``: ``weight``, or each of ``weights``."""
        one = {} if self.weight is None else {"weight": self.weight}
        return one | {f"weights.{name}": weight for name, weight in self.weights}

    @cached_property
    def parts(self) -> dict[str, WeightSpec | MaskSpec]:
        """Weights and masks by key under ``correction``."""
        return {**self.all_weights, **{f"masks.{name}": mask for name, mask in self.masks}}

    @cached_property
    def normalized(self) -> WeightSpec | None:
        """The weight that is divided by its mean over the batch; None if no weight is normalised."""
        return next((weight for weight in self.all_weights.values() if weight.normalize), None)

    @cached_property
    def weighs_full_ratio(self) -> bool:
        """True if a weight uses the ratio pi / mu; such a weight needs a base loss without a ratio."""
        return any(weight.ratio == "full" for weight in self.all_weights.values())

    @cached_property
    def weight_rejects(self) -> bool:
        """True if a weight drops units outside its bounds."""
        return any(weight.kind == "reject" for weight in self.all_weights.values())

    @cached_property
    def levels(self) -> frozenset[Level]:
        """Levels of the weights and masks."""
        return frozenset(part.level for part in self.parts.values())

    @cached_property
    def needs_turns(self) -> bool:
        """True if a part has level ``turn``, or applies only after a tool result."""
        return any(part.level == "turn" or part.when == "post_tool" for part in self.parts.values())

    @cached_property
    def age_parts(self) -> dict[str, WeightSpec | MaskSpec]:
        """Parts that depend on the age of the weights that sampled a token, by key under ``correction``."""
        return {
            key: part
            for key, part in self.parts.items()
            if part.by_staleness is not None or (isinstance(part, MaskSpec) and part.entry.of_age)
        }

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
    def step_parts(self) -> dict[str, WeightSpec | MaskSpec]:
        """Parts that need the current policy or the advantages, by key under ``correction``."""
        return {key: part for key, part in self.parts.items() if part.needs_step}

    @cached_property
    def rollout_parts(self) -> dict[str, WeightSpec | MaskSpec]:
        """Parts that read only mu and pi_old. Their order matters only for ``skyrl_compat``."""

        def place(key: str) -> int:
            part = self.parts[key]
            if isinstance(part, WeightSpec):
                return 2
            if part.level == "token":
                return 1
            return 0 if part.aggregate == "any" else 3

        return {key: self.parts[key] for key in sorted(self.parts, key=place) if key not in self.step_parts}

    @cached_property
    def rollout_rejects(self) -> dict[str, WeightSpec | MaskSpec]:
        """The parts of ``rollout_parts`` that can drop tokens."""
        return {
            key: part for key, part in self.rollout_parts.items() if isinstance(part, MaskSpec) or part.kind == "reject"
        }


def proximal_log_prob(
    proximal: Proximal,
    alpha: Alpha | None,
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    ages: Tensor | None = None,
) -> Tensor:
    """Compute the log pi_old that corrections and the base loss use.

    * ``recompute``: the trainer computes pi_old at the start of the step. There are three policies, as in decoupled
      PPO.
    * ``bypass``: mu itself, so PPO's ratio is pi / mu. There are two policies.
    * ``reuse``: the current policy, detached. The result is exact if there is only one gradient step per batch, because
      pi_old then equals pi.
    * ``loglinear``: (1 - alpha) log mu + alpha log pi, detached: an interpolation between the sampling and the current
      policy. It is an approximation that costs no forward pass. With ``alpha=by_age``, alpha is (a - 1) / a for a token
      of age a, and 0 at age 0, as in AReaL's ``compute_prox_logp_approximations``. In that function, pi comes from the
      newest weights, a versions after those that sampled the token, and pi_old from the weights one version before the
      newest. AReaL's documentation describes pi_old as one step behind the trained policy; under that definition, alpha
      would be a / (a + 1).
    * ``same_engine``: mu itself, for an engine whose log-probs equal the trainer's. The trainer computes pi_old in its
      first step and stops unless mu and pi_old agree, see ``proof.rollout_log_probs``.

    Args:
        old_log_prob: (B, T), read only for ``recompute``.
        rollout_log_prob: (B, T), log mu.
        log_prob: (B, T), log pi, detached here.
        ages: (B,) or (B, T), the number of weight versions since each row, or token, was sampled; read only for
            ``by_age``.

    Raises:
        ValueError: ``ages`` are missing for ``by_age``.

    Returns:
        (B, T), in the dtype of the log-probs from which it is computed; float32 or wider for ``loglinear``.

    Example:
        >>> old, mu, pi = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[-4.0]])
        >>> policies = dict(old_log_prob=old, rollout_log_prob=mu, log_prob=pi)
        >>> [proximal_log_prob(source, None, **policies).item() for source in ("recompute", "bypass", "reuse")]
        [-1.0, -2.0, -4.0]
        >>> proximal_log_prob("loglinear", 0.5, **policies).item()  # halfway between mu and pi
        -3.0
        >>> proximal_log_prob("loglinear", "by_age", **policies, ages=torch.tensor([2])).item()  # (2 - 1) / 2
        -3.0
    """
    match proximal:
        case "recompute":
            return old_log_prob
        case "bypass" | "same_engine":
            return rollout_log_prob
        case "reuse":
            return log_prob.detach()
        case "loglinear":
            assert alpha is not None, "validated with the correction"
            dtype = torch.promote_types(torch.promote_types(rollout_log_prob.dtype, log_prob.dtype), torch.float32)
            share: Tensor | float
            if alpha == BY_AGE:
                share = _share_by_age(ages, rollout_log_prob.device, dtype)
            else:
                share = float(alpha)
            return torch.lerp(rollout_log_prob.to(dtype), log_prob.detach().to(dtype), share)


def _share_by_age(ages: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    if ages is None:
        raise ValueError(
            "correction.alpha=by_age needs the age of the weights, but the batch does not contain the versions of "
            "the weights that sampled it. Set correction.alpha=0.5 for example."
        )
    age = (ages if ages.dim() == 2 else ages[:, None]).to(device, dtype)
    return (age - 1).clamp(min=0) / age.clamp(min=1)


def compute_squared_log_ratio(log_prob: Tensor, other: Tensor, response_mask: Tensor) -> Tensor:
    """Compute (log pi - log other)^2 per token, 0 outside the mask or if ``other`` is not finite; differentiable in pi.

    Args:
        log_prob: (B, T) log pi.
        other: (B, T) log-probs of the penalty's reference policy, detached here.
        response_mask: (B, T) bool.

    Example:
        >>> pi, mu = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, float("nan")]])
        >>> compute_squared_log_ratio(pi, mu, torch.ones(1, 2, dtype=torch.bool)).tolist()
        [[4.0, 0.0]]
    """
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    other = other.detach().to(dtype)
    valid = response_mask & torch.isfinite(other)
    # Tokens are selected before the subtraction, so that no gradient passes through non-finite values.
    return (log_prob.to(dtype) - torch.where(valid, other, log_prob.detach().to(dtype))).square() * valid
