"""Trials of loss terms other than the policy term, and the gradients that all parts of the proof compare."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch import micro_batch as mb
from ..batch.padding import flatten
from ..batch.plan import SharedPlan, mini_batch_mean
from ..correction import BatchConstants, CorrectionSpec, MaskSpec, StepStage, WeightSpec
from ..correction.centering import select_token_parts
from ..correction.spec import Side
from .trials import list_bounds, replace_policies

BoundLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""Loss function of (model_output, data)."""


class CorrectedLoss(Protocol):
    """Interface of the loss under test, see ``worker.loss.OffPolicyLoss``."""

    spec: CorrectionSpec
    prove: bool
    shadows: dict[str, CorrectionSpec]
    moving: dict[str, Side]
    verl_loss: BoundLoss
    base_loss: BoundLoss
    extensions: Mapping[str, Any]
    actor_config: Any  # set if a penalty or an extension needs it

    def extended(self, base_loss: BoundLoss) -> BoundLoss: ...

    def __call__(self, model_output: Mapping[str, Any], data: TensorDict) -> tuple[Tensor, dict[str, Any]]: ...


@dataclass
class ShiftResult:
    """Gradient error of one correction on log-probs shifted beyond its bound.

    Attributes:
        error: largest difference between the observed and the expected gradient, relative to the larger of the expected
            and the uncorrected gradient.
        vacuous: True if the uncorrected gradient is zero, which makes the trial inconclusive.
    """

    error: float
    vacuous: bool


def base_gradient(base_loss: BoundLoss, batch: mb.MicroBatch, factor: Tensor) -> Tensor:
    """Compute verl's gradient at the log-probs, (total tokens,), with ``factor`` (B, T) as verl's weights."""
    output, leaf = batch.leaf()
    weights = (factor * batch.response_mask).to(batch.log_prob.dtype)
    handed = batch.loss_columns() | {"response_mask": batch.response_mask, mb.WEIGHTS: weights}
    loss, _ = base_loss(output, batch.data_with(**handed))
    return torch.autograd.grad(loss, leaf)[0]


def relative_error(error: Tensor, scale: Tensor) -> float:
    return float(error / scale) if float(scale) else float(error)


def adapter_gradient(
    adapter: CorrectedLoss, spec: CorrectionSpec, moved: mb.MicroBatch, constants: BatchConstants
) -> Tensor:
    output, leaf = moved.leaf()
    plan = SharedPlan(step=moved.plan.step if moved.plan else 1, constants=constants)
    handed = moved.loss_columns() | {"response_mask": moved.response_mask}
    changed = moved.data_with(plan, **handed, **{mb.WEIGHTS: None})
    loss, _ = isolate(adapter, spec)(output, changed)
    return torch.autograd.grad(loss, leaf)[0]


def isolate(adapter: CorrectedLoss, spec: CorrectionSpec) -> CorrectedLoss:
    """Copy the installed loss, with ``spec`` as its only correction and without a proof."""
    # The installed loss itself is copied (shallowly), because a substitute would prove nothing about the installed
    # loss.
    alone = copy.copy(adapter)
    alone.spec, alone.prove, alone.shadows, alone.moving, alone.extensions = spec, False, {}, {}, {}
    return alone


def token_share(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> Tensor:
    """Compute each token's share of verl's mini-batch mean, including the denominator's scale: (B, T) float64."""
    leaf = torch.zeros_like(batch.log_prob, dtype=torch.float32, requires_grad=True)
    mean = mini_batch_mean(leaf, batch.response_mask, adapter.actor_config, batch.data)
    share = torch.autograd.grad(mean, leaf)[0].double()
    return share * batch.scale[:, None] if spec.recounts and batch.scale is not None else share


def penalty_gradient(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> Tensor:
    """Compute 2 c log r times each token's share of verl's mean, or 0 where log r is not finite: (total tokens,).

    Args:
        batch: micro-batch with the pi_old that the loss uses.
    """
    assert spec.penalty is not None
    share = token_share(adapter, replace(spec, denominator="original"), batch)
    other = batch.rollout_log_prob if spec.penalty.ratio == "full" else batch.old_log_prob
    slope = 2 * (batch.log_prob.detach().double() - other.double())
    there = batch.policy_mask & torch.isfinite(slope)
    return batch.spread(torch.where(there, spec.penalty.coefficient * slope * share, 0.0))


_LEAST_TAIL = 1e-6


def expect_coefficients(spec: CorrectionSpec, log_prob: Tensor, rollout_log_prob: Tensor) -> Tensor:
    """Compute the expected gradient of C with respect to the likeliest tokens' log p, m(v) - a p(v): (..., K) float64.

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
    values = {
        "k1": -log_ratio,
        "k2": log_ratio.square() / 2,
        "k3": ratio - 1 - log_ratio,
        "tv": (ratio - 1).abs() / 2,
        "exp": log_ratio.abs(),
    }
    value = values.get(mask.aggregate.split("_")[0], log_ratio)
    kept = torch.ones_like(ratio, dtype=torch.bool)
    for side, bound in list_bounds(mask):
        kept &= value * side <= bound * side
    return kept


def place_masses(spec: CorrectionSpec, like: Tensor) -> tuple[Tensor, Tensor]:
    """Choose log p and log q of the likeliest tokens (float32), with ratios beyond and inside each bound.

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
    # Each position begins with a different ratio, so a few tokens suffice to test all bounds.
    turns = torch.arange(like.numel() // count)[:, None] + torch.arange(count)
    table = torch.tensor(ratios, dtype=torch.float64)[turns % len(ratios)].view(like.shape)
    # The masses of each policy sum to less than 1/2.
    p = torch.full_like(table, min(0.4, 0.4 * min(ratios)) / count)
    return p.log().float(), (p / table).log().float()


_FAR = 50.0  # nats; float32 log-probs of this size have an error of 4e-6


def _alternate(like: Tensor, size: float) -> Tensor:
    """Return ``size`` at even and -``size`` at odd positions of a row, float64."""
    return torch.where(torch.arange(like.shape[-1], device=like.device) % 2 == 0, size, -size).double()


def _split_kl(adapter: CorrectedLoss, batch: mb.MicroBatch) -> tuple[Tensor, Tensor]:
    """Compute verl's own gradients of the KL term and of the policy term."""
    kl = base_gradient(adapter.verl_loss, batch, torch.zeros_like(batch.log_prob))
    return kl, base_gradient(adapter.verl_loss, batch, torch.ones_like(batch.log_prob)) - kl


def _compare(
    adapter: CorrectedLoss, spec: CorrectionSpec, moved: mb.MicroBatch, demanded: Tensor, term: Tensor
) -> ShiftResult:
    """Compare the adapter's gradient with the expected gradient, relative to the gradient of the term under test."""
    error = (adapter_gradient(adapter, spec, moved, BatchConstants()) - demanded).abs().max()
    scale = term.abs().max()
    return ShiftResult(relative_error(error, scale), vacuous=not float(scale))


def _merge(results: Sequence[ShiftResult]) -> ShiftResult:
    return ShiftResult(max(each.error for each in results), vacuous=any(each.vacuous for each in results))


def try_kl(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> ShiftResult:
    """Compare the KL term's gradient under ratios beyond and inside its clip with verl's own gradient at ratio 1."""
    assert spec.kl_clip is not None
    lower, upper = spec.kl_clip
    log_prob = batch.log_prob.double()
    # Move pi away from the reference in both directions, because the KL term has no gradient at pi = ref.
    batch = replace(batch, data=batch.data_with(ref_log_prob=(log_prob + _alternate(log_prob, 0.3)).float()))
    results = []
    # The term is clipped where the loss would decrease further: above the upper bound for a negative slope, and below
    # the lower bound for a positive slope. It is not clipped at the last ratio.
    for ratio, clipped in ((1.1 * upper, -1.0), (lower / 1.1, 1.0), (math.sqrt(upper), 0.0)):
        old = log_prob - math.log(ratio)
        moved = replace_policies(batch, old=old, mu=old, advantages=torch.ones_like(log_prob))
        kl, policy = _split_kl(adapter, moved)
        demanded = policy + torch.where(kl * clipped > 0, 0.0, ratio * kl)
        results.append(_compare(adapter, spec, moved, demanded, kl))
    return _merge(results)


def try_kl_weight(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> ShiftResult:
    """Compare the gradient of the KL term, at ratios inside and outside its bound, with verl's own at ratio 1.

    With d = log pi_ref - log pi and verl's slope k'(d), the slope of the term r k is r (k + k'), or upper k' once the
    ratio exceeds the bound ``upper``. k / k' is -d for k1, and (e^d - 1 - d) / (1 - e^d) for k3.
    """
    assert spec.kl_weight is not None
    upper = spec.kl_weight.upper
    log_prob = batch.log_prob.double()
    apart = _alternate(log_prob, 0.3)
    batch = replace(batch, data=batch.data_with(ref_log_prob=(log_prob + apart).float()))
    of_k1 = str(adapter.actor_config.kl_loss_type) in ("kl", "k1")
    share = -apart if of_k1 else (torch.expm1(apart) - apart) / -torch.expm1(apart)
    results = []
    for ratio in (0.7, 1.5) if upper is None else (0.7, math.sqrt(upper), 1.1 * upper):
        # The ratio that must not be used is set to the inverse, so the comparison detects its use.
        shifted, other = log_prob - math.log(ratio), log_prob + math.log(ratio)
        old, mu = (other, shifted) if spec.kl_weight.ratio == "full" else (shifted, other)
        moved = replace_policies(batch, old=old, mu=mu, advantages=torch.zeros_like(log_prob))
        kl, policy = _split_kl(adapter, moved)
        # A clamped ratio is a constant with slope 0.
        bounded = upper is not None and ratio > upper
        factor = torch.full_like(apart, upper) if bounded and upper is not None else ratio * (1 + share)
        demanded = policy + kl * batch.spread(factor.expand_as(log_prob))
        results.append(_compare(adapter, spec, moved, demanded, kl))
    return _merge(results)


def try_penalty(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> ShiftResult:
    """Compare a penalty's gradient with 2 c log r, where r is its own ratio and the policy term has no gradient."""
    assert spec.penalty is not None
    log_prob = batch.log_prob.double()
    # The shift is large enough, in either direction, that the penalty's gradient is as large as that of a policy term.
    shifted = log_prob - _alternate(log_prob, min(0.25 / spec.penalty.coefficient, _FAR))
    old, mu = (log_prob, shifted) if spec.penalty.ratio == "full" else (shifted, log_prob)
    moved = replace_policies(batch, old=old, mu=mu, advantages=torch.zeros_like(log_prob))
    penalty = penalty_gradient(adapter, spec, moved)
    demanded = base_gradient(adapter.base_loss, moved, torch.ones_like(log_prob)) + penalty
    return _compare(adapter, spec, moved, demanded, penalty)


def expect_centering(adapter: CorrectedLoss, batch: mb.MicroBatch, step: StepStage) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the expected gradient at the likeliest tokens' log-probs; return the output, gradient and scale."""
    spec, output = adapter.spec, batch.model_output
    by_token = {name for name, _ in select_token_parts(spec).masks}
    kept = batch.policy_mask & torch.isfinite(batch.rollout_log_prob) & torch.isfinite(batch.old_log_prob)
    for part, drop in step.rejected.items():
        if part.startswith("masks.") and part.removeprefix("masks.") not in by_token:
            kept = kept & ~drop
    pull = torch.where(kept, batch.advantages.detach().double() * token_share(adapter, spec, batch), 0.0)
    masses = (flatten(output[key]) for key in (mb.LIKELIEST_LOG_PROBS, mb.LIKELIEST_ROLLOUT_LOG_PROBS))
    coefficients = expect_coefficients(select_token_parts(spec), *masses)
    demanded = batch.spread(pull).double()[:, None] * coefficients
    # Rounding grows with the coefficients, which are unbounded if the policy has no tail.
    scale = torch.cat([pull.flatten(), demanded.flatten()]).abs().max()
    return output[mb.LIKELIEST_LOG_PROBS], demanded, scale


def try_centering(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> ShiftResult:
    """Compare the gradient at the likeliest tokens' log-probs, placed around each bound, with A (m - a p)."""
    like = flatten(batch.model_output[mb.LIKELIEST_LOG_PROBS]).detach()
    log_p, log_q = place_masses(select_token_parts(spec), like)
    leaf = log_p.to(like.device, like.dtype).requires_grad_()
    output, _ = batch.leaf()
    for key, values in ((mb.LIKELIEST_LOG_PROBS, leaf), (mb.LIKELIEST_ROLLOUT_LOG_PROBS, log_q.to(like.device))):
        output[key] = torch.nested.nested_tensor_from_jagged(values, batch.model_output[key].offsets())
    same = batch.log_prob.float()
    advantages = torch.where(torch.arange(batch.width, device=same.device) % 2 == 0, 1.0, -0.5).expand_as(same)
    moved = replace_policies(batch, old=same, mu=same, advantages=advantages)
    data = moved.data_with(SharedPlan(step=1), **moved.loss_columns(), **{mb.WEIGHTS: None})
    loss, _ = isolate(adapter, spec)(output, data)
    gradient = torch.autograd.grad(loss, leaf)[0]
    pull = torch.where(batch.policy_mask, advantages.double() * token_share(adapter, spec, moved), 0.0)
    demanded = batch.spread(pull).double()[:, None] * expect_coefficients(select_token_parts(spec), leaf, log_q)
    scale = demanded.abs().max()
    return ShiftResult(error=relative_error((gradient - demanded).abs().max(), scale), vacuous=not float(scale))
