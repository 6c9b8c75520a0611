"""Terms of the loss other than the policy term: the KL loss with its own ratio, the penalty and score centering.

verl adds mean_t k(pi, pi_ref) to the loss as if the tokens had been sampled by the current policy. They were sampled by
pi_old, so each term's gradient needs a clipped ratio pi / pi_old, like PPO's policy term (Liu et al. 2025, Rethinking
KL Regularization in RLHF). With an unclipped ratio to the policy that sampled the tokens, the term and its gradient
equal the reverse KL and its gradient in expectation (DeepSeek-V3.2).

Score centering reads the log-probs of the sampler's K likeliest tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils.metric import Metric

from ..batch import micro_batch as mb
from ..batch.padding import flatten
from ..batch.plan import mini_batch_mean
from ..correction import CorrectionSpec, Statistic, StepStage
from ..correction.centering import compute_centering, compute_coefficients, compute_drift
from ..correction.correction_parts import KlWeightSpec, PenaltySpec, compute_squared_log_ratio
from ..correction.ratios import EXP_CLAMP
from ..correction.rules import centers_mask, find_unknown
from ..correction.statistics import Reduction
from ..correction.validation import rename_for_metrics

BaseLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""Called with (config, model_output, data, dp_group), like verl's ``ppo_loss``."""
BoundLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""Called with (model_output, data, dp_group)."""
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor, str], Tensor]
"""Called with log pi, log pi_old, log mu and log pi_ref, (B, T) each, and ``kl_loss_type``; returns KL per token."""


def compute_clipped_kl(
    log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, *, kind: str, lower: float, upper: float
) -> Tensor:
    """Compute each token's KL surrogate, max(r k', clip(r, lower, upper) k') with r = pi / pi_old.

    k' = dk / dlog pi is the slope of this kind of KL loss. At r = 1, the gradient therefore equals that of k. The slope
    plays the role of PPO's negative advantage. The term is minimised, so the maximum is the pessimistic choice.

    Args:
        log_prob: (B, T) log pi, carries the gradient.
        old_log_prob: (B, T); the term is 0 where this log-prob is not finite.
        ref_log_prob: (B, T).
        kind: verl's ``kl_loss_type``.

    Returns:
        (B, T).
    """
    known = torch.isfinite(old_log_prob)
    old_log_prob = torch.where(known, old_log_prob, log_prob.detach().to(old_log_prob.dtype))
    leaf = log_prob.detach().clone().requires_grad_()
    with torch.enable_grad():
        penalty = kl_penalty(logprob=leaf, ref_logprob=ref_log_prob, kl_penalty=kind)
        slope = torch.autograd.grad(penalty.sum(), leaf)[0]
    ratio = torch.exp((log_prob - old_log_prob).clamp(-EXP_CLAMP, EXP_CLAMP))
    return torch.maximum(ratio * slope, ratio.clamp(lower, upper) * slope) * known


def compute_weighted_kl(
    log_prob: Tensor, other_log_prob: Tensor, ref_log_prob: Tensor, *, kind: str, upper: float | None
) -> Tensor:
    """Compute each token's weighted KL estimate, min(r, upper) k(pi, pi_ref) with r = pi / other.

    The gradient also flows through r. Without truncation and for the kinds k1 and k3, the expectation of the term over
    ``other`` is the token's KL(pi, pi_ref), and the same holds for the gradients (DeepSeek-V3.2, unbiased KL estimate).

    Args:
        log_prob: (B, T) log pi, carries the gradient.
        other_log_prob: (B, T) log-probs of the policy that sampled the tokens, or of its substitute; the term is 0
            where they are not finite.
        ref_log_prob: (B, T).
        kind: verl's ``kl_loss_type``.
        upper: largest ratio; larger ratios are replaced with this constant. None for no limit.

    Returns:
        (B, T).
    """
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    known = torch.isfinite(other_log_prob)
    # Tokens are selected before the subtraction, so that no gradient passes through non-finite values.
    other = torch.where(known, other_log_prob.to(dtype), log_prob.detach().to(dtype))
    ratio = torch.exp((log_prob.to(dtype) - other).clamp(-EXP_CLAMP, EXP_CLAMP))
    if upper is not None:
        ratio = ratio.clamp(max=upper)
    return ratio * kl_penalty(logprob=log_prob, ref_logprob=ref_log_prob, kl_penalty=kind) * known


def choose_surrogate(spec: CorrectionSpec, *, has_kl: bool = True) -> Surrogate | None:
    """Choose the term that replaces verl's KL estimate under ``spec``; None keeps verl's estimate.

    Args:
        has_kl: True if verl's loss has a KL term.
    """
    if spec.kl_clip is not None:
        lower, upper = spec.kl_clip
        return partial(_clip, lower, upper)
    if spec.kl_weight is not None:
        return partial(_weigh, spec.kl_weight)
    if spec.support is not None and has_kl:
        return _keep
    return None


def _keep(log_prob: Tensor, old: Tensor, mu: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Compute verl's own KL over the whole vocabulary, even if ``log_probs`` cover only a support."""
    return kl_penalty(log_prob, ref, kind)


def _clip(lower: float, upper: float, log_prob: Tensor, old: Tensor, mu: Tensor, ref: Tensor, kind: str) -> Tensor:
    return compute_clipped_kl(log_prob, old, ref, kind=kind, lower=lower, upper=upper)


def _weigh(spec: KlWeightSpec, log_prob: Tensor, old: Tensor, mu: Tensor, ref: Tensor, kind: str) -> Tensor:
    other = mu if spec.ratio == "full" else old
    return compute_weighted_kl(log_prob, other, ref, kind=kind, upper=spec.upper)


def replace_kl(base_loss: BaseLoss, config: Any, surrogate: Surrogate) -> BoundLoss:
    """Replace the KL term of ``base_loss`` under ``config`` (verl's ActorConfig) with ``surrogate``."""
    plain = partial(base_loss, dataclasses.replace(config, use_kl_loss=False))
    return partial(_loss_with_surrogate, plain, config, surrogate)


def _loss_with_surrogate(
    plain: BoundLoss,
    config: Any,
    surrogate: Surrogate,
    model_output: Mapping[str, Any],
    data: TensorDict,
    dp_group: Any = None,
) -> tuple[Tensor, dict[str, Any]]:
    loss, metrics = plain(model_output, data, dp_group)
    # verl's loss needs a finite pi_old, so pi replaces a non-finite pi_old; in this term, such tokens have no ratio.
    old = mb.PI_OLD if mb.PI_OLD in data.keys() else "old_log_probs"
    dense = data.select("response_mask", old, mb.ROLLOUT_LOG_PROBS, "ref_log_prob").to_padded_tensor()
    if (full := model_output.get(mb.FULL_LOG_PROBS)) is not None:
        model_output = {"log_probs": full}
    log_prob = mb.pad_log_probs(model_output, data)
    reference, kind = dense["ref_log_prob"], config.kl_loss_type

    aggregate = partial(mini_batch_mean, response_mask=dense["response_mask"].to(bool), actor_config=config, data=data)
    term = surrogate(log_prob, dense[old], dense[mb.ROLLOUT_LOG_PROBS], reference, kind)
    penalty = aggregate(kl_penalty(log_prob.detach(), reference, kind))
    metrics = metrics | {
        "kl_loss": Metric(aggregation=metrics["actor/pg_loss"].aggregation, value=penalty),
        "kl_coef": config.kl_loss_coef,
    }
    return loss + config.kl_loss_coef * aggregate(term), metrics


def compute_penalty(spec: PenaltySpec, batch: mb.MicroBatch, correction: CorrectionSpec) -> Tensor:
    """Compute (log r)^2 of each token, (B, T), differentiable, including the scale of ``nonfinite=excluded``.

    Args:
        correction: the correction with ``spec``, which defines pi_old.
    """
    other = batch.rollout_log_prob if spec.ratio == "full" else mb.choose_pi_old(correction, batch)
    squares = compute_squared_log_ratio(batch.log_prob, other, batch.policy_mask)
    if correction.nonfinite == "counted":
        return squares
    return squares * mb.read_scale(correction, batch)[:, None].to(squares.dtype)


@dataclass(frozen=True)
class LikeliestTokens:
    """Log-probs of the likeliest tokens at each response position.

    Attributes:
        log_prob: (B, T, K) log pi, differentiable; 0 where there is no token.
        rollout_log_prob: (B, T, K) log mu, -inf where there is no token, and on padding.
    """

    log_prob: Tensor
    rollout_log_prob: Tensor
    _known: dict[CorrectionSpec, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, batch: mb.MicroBatch) -> LikeliestTokens:
        """Read the likeliest tokens of a micro-batch.

        Raises:
            KeyError: the engine did not compute them.
        """
        return cls(
            _read(batch.model_output, mb.LIKELIEST_LOG_PROBS, batch),
            _read(batch.model_output, mb.LIKELIEST_ROLLOUT_LOG_PROBS, batch).masked_fill(
                ~batch.response_mask[..., None], float("-inf")
            ),
        )

    def coefficients(self, spec: CorrectionSpec) -> Tensor:
        """Compute m(v) - a p(v) once per correction: (B, T, K) float64, see ``correction.centering``."""
        if spec not in self._known:
            shape = self.log_prob.shape
            flat = (each.reshape(-1, shape[-1]) for each in (self.log_prob, self.rollout_log_prob))
            self._known[spec] = compute_coefficients(spec, *flat).view(shape)
        return self._known[spec]


def _read(output: Mapping[str, Any], key: str, batch: mb.MicroBatch) -> Tensor:
    if key not in output or batch.layout is None:
        raise KeyError(
            f"{key} is not in the model's output, because this worker does not compute the log-probs of the K "
            "likeliest tokens, which score centering needs. Set correction.centering=null."
        )
    return batch.layout.responses_of(flatten(output[key]))


def compute_centering_term(
    spec: CorrectionSpec, batch: mb.MicroBatch, step: StepStage, likeliest: LikeliestTokens
) -> Tensor:
    """Compute A C of each token, (B, T), differentiable; 0 where a mask that is not part of C drops the token.

    Args:
        step: the decisions of ``spec`` on the batch.
    """
    coefficients = likeliest.coefficients(spec)
    centred = {f"masks.{name}" for name, mask in spec.masks if centers_mask(mask)} | set(spec.all_weights)
    # Tokens without mu or pi_old are excluded from C, as from the policy term.
    kept = batch.policy_mask & torch.isfinite(batch.rollout_log_prob + batch.old_log_prob)
    for part, drop in step.rejected.items():
        kept = kept if part in centred else kept & ~drop
    factor = torch.where(kept, batch.advantages.detach(), 0.0)
    if spec.recounts:
        factor = factor * mb.read_scale(spec, batch)[:, None]
    term = compute_centering(likeliest.log_prob, coefficients)
    return factor.to(term.dtype) * term


@torch.no_grad()
def measure_drift(
    spec: CorrectionSpec, shadows: Mapping[str, CorrectionSpec], batch: mb.MicroBatch, likeliest: LikeliestTokens
) -> dict[str, Statistic]:
    """Measure the drift without centering, for the correction and for each shadow whose parts are per token."""
    specs = {"drift": spec}
    known = {name: shadow for name, shadow in shadows.items() if not find_unknown(shadow)}
    specs |= {f"drift/{rename_for_metrics(name)}": shadow for name, shadow in known.items()}
    count = batch.policy_mask.sum(dtype=torch.float64)
    found = {}
    for name, each in specs.items():
        drift = compute_drift(likeliest.log_prob, likeliest.coefficients(each))
        found[f"{name}/mean"] = Statistic(Reduction.MEAN, (torch.where(batch.policy_mask, drift, 0.0).sum(), count))
    return found
