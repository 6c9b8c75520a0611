"""Worker side of the liveness proof: collects evidence from one micro-batch.

``prove`` compares the gradient that arrives at the log-probs in the engine's own backward pass with weight * keep *
verl's own gradient. Where mu equals pi_old, a correction that has no effect would pass this comparison too. ``prove``
therefore calls the installed loss again with log-probs just inside and just beyond each bound, where the expected
gradient depends only on the bound. ``proof.verify`` checks the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batch import micro_batch as mb
from ..batch.padding import flatten, take_rows
from ..correction import BatchConstants, CorrectionSpec
from ..correction.centering import select_token_parts
from .prefix_trials import build_prefix_mask_trials, build_prefix_weight_trials
from .term_trials import (
    BoundLoss,
    CorrectedLoss,
    ShiftResult,
    adapter_gradient,
    base_gradient,
    expect_centering,
    penalty_gradient,
    relative_error,
    try_centering,
    try_kl,
    try_kl_weight,
    try_penalty,
)
from .trials import BEYOND, Trial, age_first_tokens, build_mask_trials, build_weight_trials

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest accepted relative error of a gradient, by the dtype of the log-probs."""
MOST_TRIED = 8
"""Number of rows of a micro-batch that trials use."""


@dataclass
class Proof:
    """Evidence from one micro-batch, in plain Python values.

    Attributes:
        tokens: number of response tokens.
        marked: sum of the marks with which the trainer requested the proof of this micro-batch.
        tried: True if trials were run.
        identical_tokens: number of tokens whose mu equals pi_old bitwise.
        tolerance: largest accepted value of each of these errors, by the dtype of the log-probs.
        log_prob_bits: number of bits of the coarsest dtype among mu, pi_old and pi.
        distances: sums over tokens of |log pi_old - log mu|, in nats, with the mu of the previous, the same and the
            next token. These sums reveal a mu that is off by one token. If pi_old is not computed, pi replaces it.
        inner_tokens: number of tokens over which ``distances`` are summed.
        row_distances: sums over tokens of |log pi - log pi_old|, in nats, with the pi_old of the same row and of the
            next row. These sums reveal whether the engine's log-probs belong to other rows. If pi_old is not computed,
            mu replaces it.
        shifts: correction name -> result on the shifted micro-batch.
        gradient_tokens: number of tokens at which the uncorrected policy term has a gradient; if it is 0, the proof is
            inconclusive.
        gradient_error: relative error of the gradient in the engine's own backward pass; None before this pass has run,
            infinite if no part of the loss was differentiated.
    """

    tokens: int
    identical_tokens: int
    tolerance: float
    log_prob_bits: int
    distances: tuple[float, float, float] = (0.0, 0.0, 0.0)
    inner_tokens: int = 0
    row_distances: tuple[float, float] = (0.0, 0.0)
    shifts: dict[str, ShiftResult] = field(default_factory=dict)
    gradient_tokens: int = 0
    gradient_error: float | None = None
    marked: int = 0
    tried: bool = True


def prove(adapter: CorrectedLoss, batch: mb.MicroBatch, loss: Tensor) -> Proof:
    """Prove one micro-batch; the backward pass through ``loss`` completes the returned proof.

    Args:
        adapter: the installed loss; shifted micro-batches run through the same code.
        batch: the micro-batch that the engine is processing.
        loss: the tensor that the engine will differentiate, possibly after scaling it.
    """
    mask, mu, old = batch.response_mask, batch.rollout_log_prob, batch.old_log_prob
    proof = Proof(
        tokens=int(mask.sum()),
        identical_tokens=int((mask & ((mu == old) | (mu.isnan() & old.isnan()))).sum()),
        tolerance=TOLERANCE.get(batch.log_prob.dtype, TOLERANCE[torch.float32]),
        log_prob_bits=8 * min(each.element_size() for each in (mu, old, batch.log_prob)),
        marked=sum(batch.marks),
        tried=not batch.marks or max(batch.marks) > 1,
    )
    if not proof.tokens:
        return proof
    trainer = batch.old_log_prob if adapter.spec.proximal == "recompute" else batch.log_prob.detach()
    proof.distances, proof.inner_tokens = _distances(trainer, batch)
    proof.row_distances = _row_distances(batch)
    step = mb.decide(adapter.spec, batch, measure="nothing")
    factor = mb.compute_factor(adapter.spec, batch, step)
    old = _expected_proximal(adapter.spec, batch)
    seen = replace(batch, old_log_prob=_finite(old, batch), data=batch.data_with(**{mb.PI_OLD: old}))
    predicted, policy = _demanded(adapter.base_loss, seen, factor)
    proof.gradient_tokens = int((policy != 0).sum())
    if adapter.spec.penalty is not None:
        predicted = predicted + penalty_gradient(adapter, adapter.spec, seen)
    if adapter.extensions:
        # Extensions add to verl's whole loss here, so the proof catches a term that replaces part of that loss.
        terms = adapter.extended(_without_gradient(adapter.base_loss))
        predicted = predicted + base_gradient(terms, seen, factor)
    watched = [(batch.model_output["log_probs"], predicted, _scale(predicted, policy))]
    if adapter.spec.centering is not None:
        watched.append(expect_centering(adapter, batch, step))
    _watch(proof, watched, loss)
    if not proof.tried:
        return proof
    few = _take_few(batch)
    for name, spec in isolate_parts(adapter.spec):
        proof.shifts[name] = _tried(adapter, spec, few)
    return proof


def _take_few(batch: mb.MicroBatch) -> mb.MicroBatch:
    """Take the longest row and a few more; all trials replace the log-probs, so further rows would add no evidence."""
    tokens = batch.response_mask.sum(-1).tolist()
    rows = sorted((row for row, count in enumerate(tokens) if count), key=lambda row: -tokens[row])
    if len(tokens) <= MOST_TRIED:
        return batch
    chosen = {rows[place * (len(rows) - 1) // (MOST_TRIED - 1)] for place in range(MOST_TRIED)}
    return mb.read(*take_rows(batch.model_output, batch.data, sorted(chosen)))


def _distances(trainer: Tensor, batch: mb.MicroBatch) -> tuple[tuple[float, float, float], int]:
    """Sum |trainer - log mu| over the inner tokens of all rows, with mu of the previous, the same and the next token.

    Returns:
        The three sums, and the number of inner tokens.
    """
    old, mu = trainer.float(), batch.rollout_log_prob.float()
    usable = batch.response_mask & torch.isfinite(old) & torch.isfinite(mu)
    inner = usable[:, :-2] & usable[:, 1:-1] & usable[:, 2:]
    here = old[:, 1:-1]
    before, same, after = (
        float(torch.where(inner, (here - other).abs(), 0.0).sum()) for other in (mu[:, :-2], mu[:, 1:-1], mu[:, 2:])
    )
    return (before, same, after), int(inner.sum())


def _row_distances(batch: mb.MicroBatch) -> tuple[float, float]:
    """Sum |log pi - log pi_old| over positions that exist in the next row, with pi_old of the same and the next row."""
    pi, old = batch.log_prob.detach().float(), batch.old_log_prob.float()
    if len(pi) == 1:  # there is no other row
        return 0.0, 0.0
    usable = batch.policy_mask & torch.isfinite(old) & torch.isfinite(pi)
    both = usable & usable.roll(1, 0)
    own, other = (float(torch.where(both, (pi - each).abs(), 0.0).sum()) for each in (old, old.roll(1, 0)))
    return own, other


def isolate_parts(spec: CorrectionSpec) -> list[tuple[str, CorrectionSpec]]:
    """List a correction for each configured part, with only that part: (Hydra path under ``correction``, spec)."""
    parts = [(f"masks.{name}", CorrectionSpec(masks=((name, mask),))) for name, mask in spec.masks]
    weights = [(f"weights.{name}", CorrectionSpec(weights=((name, weight),))) for name, weight in spec.weights]
    if spec.weight is not None:
        weights.insert(0, ("weight", CorrectionSpec(weight=spec.weight)))
    parts = weights + parts
    if spec.proximal != "recompute":
        parts.append(("proximal", CorrectionSpec(proximal=spec.proximal, alpha=spec.alpha)))
    terms: dict[str, Any] = {name: getattr(spec, name) for name in ("kl_clip", "kl_weight", "penalty")}
    parts += [(name, CorrectionSpec(**{name: term})) for name, term in terms.items() if term is not None]
    if spec.centering is not None:
        parts.append(("centering", replace(select_token_parts(spec), centering=spec.centering)))
    return parts


def _finite(old_log_prob: Tensor, batch: mb.MicroBatch) -> Tensor:
    stand_in = batch.log_prob.detach().to(old_log_prob.dtype)
    return torch.where(torch.isfinite(old_log_prob), old_log_prob, stand_in)


def _demanded(base_loss: BoundLoss, batch: mb.MicroBatch, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the expected gradients of a correction and of the uncorrected policy term, each (total tokens,).

    The factor multiplies only the policy term, so the expected gradient is factor * (g(1) - g(0)) + g(0). Here, g(c) is
    verl's gradient under constant weights c, and g(0) is the contribution of KL and other terms.
    """
    rest = base_gradient(base_loss, batch, torch.zeros_like(factor))
    policy = base_gradient(base_loss, batch, torch.ones_like(factor)) - rest
    return batch.spread(factor) * policy + rest, policy


def _without_gradient(base_loss: BoundLoss) -> BoundLoss:
    """Wrap the base loss so that value and metrics stay the same, but the gradient is zero."""

    def constant(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics = base_loss(*args, **kwargs)
        return loss.detach() + 0.0 * loss, metrics

    return constant


def _watch(proof: Proof, watched: list[tuple[Tensor, Tensor, Tensor]], loss: Tensor) -> None:
    """Compare the gradients that arrive in the engine's backward pass with the expected gradients.

    Args:
        watched: for each model output, nested or padded: the output, its flattened expected gradient, and the scale of
            an error.
    """
    upstream: list[Tensor] = []
    errors: list[float] = []

    def at_loss(gradient: Tensor) -> None:
        upstream.append(gradient.detach())

    def compare(predicted: Tensor, scale: Tensor, gradient: Tensor) -> None:
        factor = upstream[-1] if upstream else gradient.new_zeros(())
        error = (flatten(gradient.detach()) - predicted * factor).abs().max()
        # Without a backward pass through the loss, or with factor 0, there is nothing to compare.
        errors.append(relative_error(error, scale * factor.abs()) if factor else math.inf)
        proof.gradient_error = max(errors) if len(errors) == len(watched) else math.inf

    loss.register_hook(at_loss)
    for output, predicted, scale in watched:
        output.register_hook(partial(compare, predicted, scale))


def _scale(demanded: Tensor, policy: Tensor) -> Tensor:
    """Return the scale of an error: rounding grows with the weight, but a rejection (0) must not hide an error."""
    return torch.maximum(demanded.abs().max(), policy.abs().max())


def _tried(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> ShiftResult:
    """Compare the gradients with only ``spec`` active, on trials in which it must and must not change the gradient."""
    # A trial tests each bound on all tokens, even on tokens whose support is unknown.
    detached = replace(batch, log_prob=batch.log_prob.detach(), withheld=None)
    batch = replace(detached, old_log_prob=_finite(detached.old_log_prob, detached))
    of_terms = {"kl_clip": try_kl, "kl_weight": try_kl_weight, "penalty": try_penalty, "centering": try_centering}
    if term := next((name for name in of_terms if getattr(spec, name) is not None), None):
        return of_terms[term](adapter, spec, batch)
    errors = []
    seen: dict[str, bool] = {}
    for trial in _trials(spec, batch):
        there = trial.batch.restate()
        moved = replace(there, old_log_prob=_expected_proximal(spec, there))
        demanded, policy = _demanded(adapter.base_loss, moved, trial.factor)
        gradient = adapter_gradient(adapter, spec, there, trial.constants)
        errors.append(relative_error((gradient - demanded).abs().max(), _scale(demanded, policy)))
        if spec.proximal != "recompute":
            # The trial is conclusive if the gradient would differ with the decoy as pi_old.
            decoy, _ = _demanded(adapter.base_loss, there, trial.factor)
            visible = bool((decoy != demanded).any())
        else:
            acts = there.spread((trial.factor != 1).double() * batch.response_mask) > 0
            visible = bool((acts & (policy != 0)).any())
        if trial.label:
            seen[trial.label] = seen.get(trial.label, False) or visible
    return ShiftResult(error=max(errors), vacuous=not all(seen.values()))


def _trials(spec: CorrectionSpec, batch: mb.MicroBatch) -> Iterable[Trial]:
    if spec.proximal != "recompute":
        return [_proximal_trial(age_first_tokens(batch, 3) if spec.alpha == "by_age" else batch)]
    for weight in spec.all_weights.values():
        return (build_prefix_weight_trials if weight.level == "prefix" else build_weight_trials)(weight, batch)
    name, mask = spec.masks[0]
    if mask.level == "prefix" and not mask.entry.of_age:
        return build_prefix_mask_trials(mask, batch)
    return build_mask_trials(name, mask, batch)


def _proximal_trial(batch: mb.MicroBatch) -> Trial:
    """Build a trial with mu slightly above pi, where nothing is clipped, and a decoy as pi_old."""
    log_prob = batch.log_prob.double()
    moved = replace(
        batch,
        # The decoy is far enough from mu to change the gradient measurably.
        old_log_prob=(log_prob + 30 * BEYOND).float(),
        rollout_log_prob=(log_prob + 5 * BEYOND).float(),
        advantages=torch.ones_like(batch.advantages),
        scale=None,
    )
    return Trial("pi_old", moved, torch.ones_like(log_prob), BatchConstants())


def _expected_proximal(spec: CorrectionSpec, batch: mb.MicroBatch) -> Tensor:
    # The adapter uses proximal_log_prob, so it cannot define the expected value and is not called here.
    if spec.proximal == "recompute":
        return batch.old_log_prob
    if spec.proximal == "loglinear":
        assert spec.alpha is not None
        pi, mu = batch.log_prob.detach().double(), batch.rollout_log_prob.double()
        share = _share_by_age(batch) if spec.alpha == "by_age" else torch.full_like(pi, float(spec.alpha))
        return (pi * share + mu * (1.0 - share)).to(batch.log_prob.dtype)
    return batch.rollout_log_prob if spec.proximal in ("bypass", "same_engine") else batch.log_prob.detach()


def _share_by_age(batch: mb.MicroBatch) -> Tensor:
    """Compute (a - 1) / a for each token's age a in versions, or 0 at age 0: (B, T) float64."""
    if batch.versions is None or batch.plan is None:
        raise ValueError(
            "correction.alpha=by_age needs the versions of the weights that sampled each token, but the batch does "
            "not contain them."
        )
    age = batch.versions.compute_ages(batch.plan.step, batch.response_mask).double()
    age = age if age.dim() == 2 else age[:, None].expand(batch.response_mask.shape)
    return torch.where(age > 0, 1.0 - 1.0 / age, 0.0)
