"""Trials of the terms outside the policy term: KL, penalty, score centering."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..batch import micro_batch as mb
from ..batch.likeliest_tokens import LOG_PROBS, ROLLOUT_LOG_PROBS
from ..batch.plan import SharedPlan
from ..correction import BatchConstants, CorrectionSpec, MaskSpec, StepStage, WeightSpec
from ..correction.centering import select_token_parts
from .loss_gradients import (
    CorrectedLoss,
    ShiftResult,
    adapter_gradient,
    base_gradient,
    isolate,
    penalty_gradient,
    relative_error,
    token_share,
)
from .trials import list_bounds

_LEAST_TAIL = 1e-6


def expect_coefficients(spec: CorrectionSpec, log_prob: Tensor, rollout_log_prob: Tensor) -> Tensor:
    """Compute the expected gradient of C at log p of the likeliest tokens, m(v) - a p(v): (..., K) float64.

    Args:
        log_prob, rollout_log_prob: (..., K) log p and log q; log q is -inf where there is no token.
    """
    q = rollout_log_prob.double().exp()
    p = torch.where(q > 0, log_prob.detach().double().exp(), 0.0)
    rho = (1 - q.sum(-1, keepdim=True)).clamp(min=0) / (1 - p.sum(-1, keepdim=True)).clamp(min=_LEAST_TAIL)
    # Each token has a pair of masses; the tail's masses are 1 and rho.
    m = _weigh(spec, torch.cat([p, torch.ones_like(rho)], -1), torch.cat([q, rho], -1))
    return torch.where(q > 0, m[..., :-1] - m[..., -1:] * p, 0.0)


def _weigh(spec: CorrectionSpec, p: Tensor, q: Tensor) -> Tensor:
    """Compute q f(p / q), 0 where q is 0."""
    there = q > 0
    ratio = torch.where(there, p / q, 1.0)
    m = q if spec.weight is None else _weigh_by(spec.weight, ratio, p, q)
    for _, mask in spec.masks:
        m = torch.where(_keeps(mask, ratio), m, 0.0)
    return torch.where(there, m, 0.0)


def _weigh_by(weight: WeightSpec, ratio: Tensor, p: Tensor, q: Tensor) -> Tensor:
    lower, upper = weight.lower or 0.0, math.inf if weight.upper is None else weight.upper
    if weight.power is not None and weight.rate is not None:
        return q * torch.exp(weight.rate * (1 - ratio)) * ratio**weight.power
    if weight.kind == "reject":
        return torch.where((ratio >= lower) & (ratio <= upper), p, 0.0)
    return p.clamp(min=lower * q, max=upper * q)


def _keeps(mask: MaskSpec, ratio: Tensor) -> Tensor:
    """Flag the single-token ratios that the mask keeps."""
    log_ratio = ratio.log()
    match mask.aggregate.split("_")[0]:
        case "k1":
            value = -log_ratio
        case "k2":
            value = log_ratio.square() / 2
        case "k3":
            value = ratio - 1 - log_ratio
        case "tv":
            value = (ratio - 1).abs() / 2
        case "exp":
            value = log_ratio.abs()
        case _:
            value = log_ratio
    kept = torch.ones_like(ratio, dtype=torch.bool)
    for side, bound in list_bounds(mask):
        kept &= value * side <= bound * side
    return kept


def place_masses(spec: CorrectionSpec, like: Tensor) -> tuple[Tensor, Tensor]:
    """Place p and q of the likeliest tokens beyond and inside each bound of the correction; return their logs, float32.

    Args:
        like: (..., K), shape of the result.
    """
    ratios = []
    for each in (spec.weight, *(mask for _, mask in spec.masks)):
        for bound in (None if each is None else each.upper, None if each is None else each.lower):
            if bound is not None and 0 < bound < 1e3:
                ratios += [1.3 * bound, bound / 1.3]
    ratios += [1.7, 0.6, 1.0]
    count = like.shape[-1]
    # Each position begins with a different ratio, so few tokens show all bounds.
    turns = torch.arange(like.numel() // count)[:, None] + torch.arange(count)
    table = torch.tensor(ratios, dtype=torch.float64)[turns % len(ratios)].view(like.shape)
    # The masses of each policy sum to less than 1/2.
    p = torch.full_like(table, min(0.4, 0.4 * min(ratios)) / count)
    return p.log().float(), (p / table).log().float()


_FAR = 50.0  # nats; float32 log-probs of this size have an error of 4e-6


def try_kl(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> ShiftResult:
    """Compare the KL term's gradient under ratios beyond and inside its clip with verl's own at ratio 1."""
    assert spec.kl_clip is not None
    lower, upper = spec.kl_clip
    log_prob = batch.log_prob.double()
    # Move pi away from the reference in both directions: at pi = ref the KL term has no gradient.
    apart = torch.where(torch.arange(log_prob.shape[-1], device=log_prob.device) % 2 == 0, 0.3, -0.3)
    batch = replace(batch, data=batch.data_with(ref_log_prob=(log_prob + apart).float()))
    errors, scales = [], []
    # The ratios are beyond the upper bound, beyond the lower bound, and inside.
    for ratio in (1.1 * upper, lower / 1.1, math.sqrt(upper)):
        moved = replace(
            batch,
            old_log_prob=(log_prob - math.log(ratio)).float(),
            rollout_log_prob=(log_prob - math.log(ratio)).float(),
            advantages=torch.ones_like(batch.advantages),
            scale=None,
        )
        zeros, ones = torch.zeros_like(log_prob), torch.ones_like(log_prob)
        kl = base_gradient(adapter.verl_loss, moved, zeros)
        policy = base_gradient(adapter.verl_loss, moved, ones) - kl
        # The term is clipped where the loss would decrease further: above the upper bound for a negative slope, and
        # below the lower bound for a positive slope.
        clipped = (kl < 0) if ratio > upper else (kl > 0) if ratio < lower else torch.zeros_like(kl, dtype=torch.bool)
        demanded = policy + torch.where(clipped, torch.zeros_like(kl), ratio * kl)
        gradient = adapter_gradient(adapter, spec, moved, BatchConstants())
        errors.append(relative_error((gradient - demanded).abs().max(), kl.abs().max()))
        scales.append(float(kl.abs().max()))
    return ShiftResult(error=max(errors), vacuous=not all(scales))


def try_kl_weight(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> ShiftResult:
    """Compare the KL term's gradient under ratios inside and beyond its bound with verl's own at ratio 1.

    With d = log pi_ref - log pi and verl's slope k'(d), the term r k has the slope r (k + k'), and upper k' once the
    ratio is bounded. k / k' is -d for k1, and (e^d - 1 - d) / (1 - e^d) for k3.
    """
    assert spec.kl_weight is not None
    upper = spec.kl_weight.upper
    log_prob = batch.log_prob.double()
    apart = torch.where(torch.arange(log_prob.shape[-1], device=log_prob.device) % 2 == 0, 0.3, -0.3).double()
    batch = replace(batch, data=batch.data_with(ref_log_prob=(log_prob + apart).float()))
    zeros, ones = torch.zeros_like(log_prob), torch.ones_like(log_prob)
    of_k1 = str(adapter.actor_config.kl_loss_type) in ("kl", "k1")
    share = -apart if of_k1 else (torch.expm1(apart) - apart) / -torch.expm1(apart)
    errors, scales = [], []
    for ratio in (0.7, 1.5) if upper is None else (0.7, math.sqrt(upper), 1.1 * upper):
        shifted = (log_prob - math.log(ratio)).float()
        # The other ratio is the inverse, so using the wrong ratio is detected.
        other = (log_prob + math.log(ratio)).float()
        of_mu = spec.kl_weight.ratio == "full"
        moved = replace(
            batch,
            old_log_prob=other if of_mu else shifted,
            rollout_log_prob=shifted if of_mu else other,
            advantages=torch.zeros_like(batch.advantages),
            scale=None,
        )
        kl = base_gradient(adapter.verl_loss, moved, zeros)
        policy = base_gradient(adapter.verl_loss, moved, ones) - kl
        bound = upper is not None and ratio > upper
        # A clamped ratio is a constant with slope 0.
        factor = torch.full_like(zeros, upper) if bound and upper is not None else ratio * (1 + share)
        gradient = adapter_gradient(adapter, spec, moved, BatchConstants())
        demanded = policy + kl * batch.spread(factor.expand_as(zeros))
        errors.append(relative_error((gradient - demanded).abs().max(), kl.abs().max()))
        scales.append(float(kl.abs().max()))
    return ShiftResult(error=max(errors), vacuous=not all(scales))


def try_penalty(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> ShiftResult:
    """Compare a penalty's gradient with 2 c log r of its own ratio, while the policy term has no gradient."""
    assert spec.penalty is not None
    log_prob = batch.log_prob.double()
    # The shift in either direction is large enough that the penalty's gradient is as large as a policy term's.
    far = min(0.25 / spec.penalty.coefficient, _FAR)
    shift = torch.where(torch.arange(log_prob.shape[-1], device=log_prob.device) % 2 == 0, far, -far)
    of_mu = spec.penalty.ratio == "full"
    moved = replace(
        batch,
        old_log_prob=(log_prob if of_mu else log_prob - shift).float(),
        rollout_log_prob=(log_prob - shift if of_mu else log_prob).float(),
        advantages=torch.zeros_like(batch.advantages),
        scale=None,
    )
    penalty = penalty_gradient(adapter, spec, moved)
    demanded = base_gradient(adapter.base_loss, moved, torch.ones_like(log_prob)) + penalty
    gradient = adapter_gradient(adapter, spec, moved, BatchConstants())
    scale = penalty.abs().max()
    return ShiftResult(error=relative_error((gradient - demanded).abs().max(), scale), vacuous=not float(scale))


def expect_centering(adapter: CorrectedLoss, batch: mb.MicroBatch, step: StepStage) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the expected gradient at the likeliest tokens' log-probs; return the output, gradient and scale."""
    spec, output = adapter.spec, batch.model_output
    by_token = {name for name, _ in select_token_parts(spec).masks}
    kept = batch.policy_mask & torch.isfinite(batch.rollout_log_prob) & torch.isfinite(batch.old_log_prob)
    for part, drop in step.rejected.items():
        if part.startswith("masks.") and part.removeprefix("masks.") not in by_token:
            kept = kept & ~drop
    pull = torch.where(kept, batch.advantages.detach().double() * token_share(adapter, spec, batch), 0.0)
    coefficients = expect_coefficients(
        select_token_parts(spec), mb.flatten(output[LOG_PROBS]), mb.flatten(output[ROLLOUT_LOG_PROBS])
    )
    demanded = batch.spread(pull).double()[:, None] * coefficients
    # Rounding grows with the coefficients, which are unbounded if the policy has no tail.
    scale = torch.cat([pull.flatten(), demanded.flatten()]).abs().max()
    return output[LOG_PROBS], demanded, scale


def try_centering(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> ShiftResult:
    """Compare the gradient at the likeliest tokens' log-probs, placed around each bound, with A (m - a p)."""
    like = mb.flatten(batch.model_output[LOG_PROBS]).detach()
    log_p, log_q = place_masses(select_token_parts(spec), like)
    leaf = log_p.to(like.device, like.dtype).requires_grad_()
    output, _ = batch.leaf()
    for key, values in ((LOG_PROBS, leaf), (ROLLOUT_LOG_PROBS, log_q.to(like.device))):
        output[key] = torch.nested.nested_tensor_from_jagged(values, batch.model_output[key].offsets())
    same = batch.log_prob.float()
    advantages = torch.where(torch.arange(batch.width, device=same.device) % 2 == 0, 1.0, -0.5).expand_as(same)
    moved = replace(batch, old_log_prob=same, rollout_log_prob=same, advantages=advantages, scale=None)
    data = moved.data_with(
        SharedPlan(step=1),
        old_log_probs=same,
        advantages=advantages.to(batch.advantages.dtype),
        **{mb.ROLLOUT_LOG_PROBS: same, mb.WEIGHTS: None},
    )
    loss, _ = isolate(adapter, spec)(output, data)
    gradient = torch.autograd.grad(loss, leaf)[0]
    pull = torch.where(batch.policy_mask, advantages.double() * token_share(adapter, spec, moved), 0.0)
    demanded = batch.spread(pull).double()[:, None] * expect_coefficients(select_token_parts(spec), leaf, log_q)
    scale = demanded.abs().max()
    return ShiftResult(error=relative_error((gradient - demanded).abs().max(), scale), vacuous=not float(scale))
