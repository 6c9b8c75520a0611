"""The worker's half of the proof of life: what one micro-batch can show.

``prove`` compares the gradient that arrives at the log-probs in the engine's own backward with weight x keep x verl's
own gradient. Because a dead correction looks alive where mu and pi_old agree, it then calls the installed loss again
with log-probs shifted just beyond and just inside each bound, where the gradient to expect follows from the bound
alone. ``liveness.verify`` judges the result.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from . import micro_batch as mb
from .correction import CorrectionSpec, MaskSpec, WeightSpec
from .correction.ratios import row_sum

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Greatest relative error of a gradient in the dtype of the log-probs."""

_BEYOND = 0.01
"""Nats beyond a mask's bound: clear of rounding, and near enough to stay inside the base loss's own clip."""


class Adapter(Protocol):
    """The loss under proof, see ``worker_loss.OffPolicyLoss``."""

    spec: CorrectionSpec
    prove: bool

    def __call__(self, model_output: Mapping[str, Any], data: TensorDict) -> tuple[Tensor, dict[str, Any]]: ...

    def base_loss(self, model_output: Mapping[str, Any], data: TensorDict) -> tuple[Tensor, dict[str, Any]]: ...


@dataclass
class Shift:
    """One correction made to act by shifted log-probs.

    Attributes:
        error: greatest difference between the gradient seen and the one demanded, relative to the uncorrected one.
        vacuous: the uncorrected gradient is zero, so that nothing could be seen.
    """

    error: float
    vacuous: bool


@dataclass
class Proof:
    """What one micro-batch proved; plain Python.

    Attributes:
        rows: checksums of mu and the tokens it was used with, see ``micro_batch.row_checksums``.
        tokens: response tokens.
        identical_tokens: of these, tokens whose mu equals pi_old to the bit.
        tolerance: for every error here, by the dtype of the log-probs.
        log_prob_bits: bits of the coarsest of mu, pi_old and pi.
        distances: sums over tokens of |log pi_old - log mu|, in nats, with mu taken from the token before, the same
            token and the token after; they tell a mu that is off by one where it was made.
        shifts: correction name -> what the shifted micro-batch showed.
        gradient_tokens: tokens at which the uncorrected policy term has a gradient; without any nothing can be seen.
        gradient_error: relative error of the gradient in the engine's own backward; None until that has run, and
            infinite when nothing of the loss was differentiated.
    """

    rows: list[int]
    tokens: int
    identical_tokens: int
    tolerance: float
    log_prob_bits: int
    distances: tuple[float, float, float] = (0.0, 0.0, 0.0)
    shifts: dict[str, Shift] = field(default_factory=dict)
    gradient_tokens: int = 0
    gradient_error: float | None = None


def prove(
    adapter: Adapter, batch: mb.MicroBatch, model_output: Mapping[str, Any], data: TensorDict, loss: Tensor
) -> Proof:
    """Prove one micro-batch; the returned proof is completed by the backward pass through ``loss``.

    Args:
        adapter: the loss that is installed; shifted micro-batches go through the same code.
        batch: the padded tensors of the micro-batch.
        loss: what the engine is about to differentiate, maybe after scaling it.
    """
    mask = batch.response_mask
    proof = Proof(
        rows=mb.row_checksums(batch.responses, mask, batch.rollout_log_prob),
        tokens=int(mask.sum()),
        identical_tokens=int((mask & (batch.rollout_log_prob == batch.old_log_prob)).sum()),
        tolerance=TOLERANCE.get(batch.log_prob.dtype, TOLERANCE[torch.float32]),
        log_prob_bits=8 * min(t.element_size() for t in (batch.rollout_log_prob, batch.old_log_prob, batch.log_prob)),
    )
    if not proof.tokens:
        return proof
    proof.distances = _distances(batch)
    step = mb.decide(adapter.spec, batch)
    factor = step.weight * step.keep
    predicted, policy = _demanded(adapter, _finite(batch), model_output, data, factor)
    proof.gradient_tokens = int((policy != 0).sum())
    _watch(proof, model_output["log_probs"], loss, predicted, policy.abs().max())
    for name, spec in each_alone(adapter.spec):
        proof.shifts[name] = _shifted(adapter, spec, batch, model_output, data)
    return proof


def _distances(batch: mb.MicroBatch) -> tuple[float, float, float]:
    """|log pi_old - log mu| summed over the inner tokens of each row, against mu one token before, here and after."""
    old, mu = batch.old_log_prob.float(), batch.rollout_log_prob.float()
    usable = batch.response_mask & torch.isfinite(old) & torch.isfinite(mu)
    inner = usable[:, :-2] & usable[:, 1:-1] & usable[:, 2:]
    here = old[:, 1:-1]
    before, same, after = (
        float(torch.where(inner, (here - other).abs(), 0.0).sum()) for other in (mu[:, :-2], mu[:, 1:-1], mu[:, 2:])
    )
    return before, same, after


def each_alone(spec: CorrectionSpec) -> list[tuple[str, CorrectionSpec]]:
    """Each configured correction by itself, as (Hydra path below ``correction``, spec)."""
    parts = [(f"masks.{name}", CorrectionSpec(masks=((name, mask),))) for name, mask in spec.masks]
    if spec.weight is not None:
        parts.insert(0, ("weight", CorrectionSpec(weight=spec.weight)))
    return parts


def _finite(batch: mb.MicroBatch) -> mb.MicroBatch:
    stand_in = batch.log_prob.detach().to(batch.old_log_prob.dtype)
    return replace(batch, old_log_prob=torch.where(torch.isfinite(batch.old_log_prob), batch.old_log_prob, stand_in))


def _base_gradient(
    adapter: Adapter, batch: mb.MicroBatch, model_output: Mapping[str, Any], data: TensorDict, factor: Tensor
) -> Tensor:
    """Gradient of verl's own loss at the log-probs, with ``factor`` (B, T) as its weights: (total tokens,)."""
    output, leaf = mb.as_leaf(model_output)
    changed = mb.with_tensors(
        data, old_log_probs=batch.old_log_prob, advantages=batch.advantages, **{mb.WEIGHTS: factor}
    )
    loss, _ = adapter.base_loss(output, changed)
    return torch.autograd.grad(loss, leaf)[0]


def _demanded(
    adapter: Adapter, batch: mb.MicroBatch, model_output: Mapping[str, Any], data: TensorDict, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient that a correction demands, and the uncorrected policy term's, each (total tokens,).

    The factor multiplies the policy term alone, so the demanded gradient is factor x (g(1) - g(0)) + g(0), with g(c)
    verl's gradient under constant weights c: g(0) is what KL and other terms contribute.
    """
    rest = _base_gradient(adapter, batch, model_output, data, torch.zeros_like(factor))
    policy = _base_gradient(adapter, batch, model_output, data, torch.ones_like(factor)) - rest
    spread = _spread(factor, model_output, data)
    return spread * policy + rest, policy


def _spread(factor: Tensor, model_output: Mapping[str, Any], data: TensorDict) -> Tensor:
    """(B, T) factors at the positions of the flat log-probs that they belong to: (total tokens,)."""
    output, leaf = mb.as_leaf(model_output)
    padded = mb.padded(output, data)
    # The gather from flat to padded is linear, so its transpose puts each factor back where its log-prob came from.
    return torch.autograd.grad(padded, leaf, factor.to(padded.dtype))[0]


def _watch(proof: Proof, log_probs: Tensor, loss: Tensor, predicted: Tensor, scale: Tensor) -> None:
    upstream: list[Tensor] = []

    def at_loss(gradient: Tensor) -> None:
        upstream.append(gradient.detach())

    def at_log_probs(gradient: Tensor) -> None:
        factor = upstream[-1] if upstream else gradient.new_zeros(())
        error = (mb.flat(gradient.detach()) - predicted * factor).abs().max()
        # A loss that is not differentiated, or times zero, leaves nothing to compare.
        proof.gradient_error = _relative(error, scale * factor.abs()) if factor else math.inf

    loss.register_hook(at_loss)
    log_probs.register_hook(at_log_probs)


def _relative(error: Tensor, scale: Tensor) -> float:
    return float(error / scale) if float(scale) else float(error)


def _shifted(
    adapter: Adapter,
    spec: CorrectionSpec,
    batch: mb.MicroBatch,
    model_output: Mapping[str, Any],
    data: TensorDict,
) -> Shift:
    """Run the adapter on log-probs where the one correction in ``spec`` must act, or must not; compare gradients."""
    batch = replace(_finite(batch), log_prob=batch.log_prob.detach())
    trials = _weight_trials(spec.weight, batch) if spec.weight is not None else _mask_trials(spec.masks[0][1], batch)
    errors, scales = [], []
    for moved, value in trials:
        factor = torch.full_like(batch.log_prob, value) * batch.response_mask
        demanded, policy = _demanded(adapter, moved, model_output, data, factor)
        scale = policy.abs().max()
        seen = _adapter_gradient(adapter, spec, moved, model_output, data)
        errors.append(_relative((seen - demanded).abs().max(), scale))
        scales.append(float(scale))
    return Shift(error=max(errors), vacuous=not all(scales))


def _adapter_gradient(
    adapter: Adapter,
    spec: CorrectionSpec,
    moved: mb.MicroBatch,
    model_output: Mapping[str, Any],
    data: TensorDict,
) -> Tensor:
    output, leaf = mb.as_leaf(model_output)
    changed = mb.with_tensors(
        data,
        old_log_probs=moved.old_log_prob,
        advantages=moved.advantages,
        **{mb.ROLLOUT_LOG_PROBS: moved.rollout_log_prob, mb.WEIGHTS: None},
    )
    # The very call that the engine makes, of the same adapter, with one correction and no proof of its own.
    alone = copy.copy(adapter)
    alone.spec, alone.prove = spec, False
    loss, _ = alone(output, changed)
    return torch.autograd.grad(loss, leaf)[0]


def _weight_trials(spec: WeightSpec, batch: mb.MicroBatch) -> list[tuple[mb.MicroBatch, float]]:
    """Raw ratios beyond and inside each bound, with the weight demanded there."""
    demanded = {0.5: 0.5} if spec.lower is None else {2.0: 2.0} if spec.upper is None else {}
    for bound, beyond in ((spec.lower, 0.5), (spec.upper, 2.0)):
        if bound is not None:
            demanded |= {beyond * bound: bound, math.sqrt(bound): math.sqrt(bound)}
    if spec.upper is None:
        demanded[2.0] = 2.0
    return [(_weight_shift(spec, batch, raw), weight) for raw, weight in demanded.items()]


def _weight_shift(spec: WeightSpec, batch: mb.MicroBatch, raw: float) -> mb.MicroBatch:
    """mu moved so that the raw ratio of each token, or of each row, is ``raw``."""
    shift = torch.full_like(batch.log_prob, math.log(raw), dtype=torch.float32)
    if spec.level == "sequence":
        shift = shift / row_sum(batch.response_mask).clamp(min=1).to(shift.dtype)[:, None]
    # pi_old differs from pi, so that one taken for the other is seen. A ratio pi / pi_old below 1 is never clipped
    # for a positive advantage, however narrow the base loss's clip, so every token has a gradient to weigh.
    old_log_prob = batch.log_prob.float() + _BEYOND
    return replace(
        batch,
        old_log_prob=old_log_prob,
        rollout_log_prob=old_log_prob - shift,
        advantages=torch.ones_like(batch.advantages),
    )


def _mask_trials(spec: MaskSpec, batch: mb.MicroBatch) -> list[tuple[mb.MicroBatch, float]]:
    """Log-ratios beyond and inside each bound, with the factor demanded there.

    It is 0 beyond a bound for the rows that the mask looks at, and 1 inside it or for other rows.
    """
    sign = 1.0 if spec.when == "positive" else -1.0
    trials = []
    for bound, beyond in zip(_log_bounds(spec), (-_BEYOND, _BEYOND), strict=True):
        if bound is not None:
            trials.append((_mask_shift(spec, batch, bound + beyond, sign), 0.0))
            trials.append((_mask_shift(spec, batch, bound / 2, sign), 1.0))
            if spec.when != "any":
                trials.append((_mask_shift(spec, batch, bound + beyond, -sign), 1.0))
    return trials


def _log_bounds(spec: MaskSpec) -> tuple[float | None, float | None]:
    # Not spec.log_bounds, which the masks use: what is under proof does not say what is to be proved.
    if spec.delta is not None:
        return -spec.delta, None
    lower, upper = (None if bound is None else math.log(bound) for bound in (spec.lower, spec.upper))
    return lower, upper


def _mask_shift(spec: MaskSpec, batch: mb.MicroBatch, value: float, sign: float) -> mb.MicroBatch:
    """The whole log-ratio of a row on its first token, so that PPO's clip leaves the others their gradient."""
    mask = batch.response_mask
    first = mask & (mask.cumsum(-1) == 1)
    size = row_sum(mask) if spec.aggregate == "geometric" else torch.ones_like(row_sum(mask))
    shift = torch.where(first, (value * size)[:, None], torch.zeros((), dtype=torch.float64, device=mask.device))
    # The drift pi / pi_old beside it goes where PPO never clips, up for a negative advantage and down for a positive
    # one, and so far that a mask that looks at another ratio than its own decides otherwise beyond or inside a bound.
    unclipped = -sign * 1.5 * shift.abs()
    ppo, rollout = {
        "rollout": (unclipped, shift),
        "full": (unclipped, shift - unclipped),
        "ppo": (shift, -1.5 * shift),
    }[spec.ratio]
    old_log_prob = batch.log_prob.double() - ppo
    return replace(
        batch,
        old_log_prob=old_log_prob.float(),
        rollout_log_prob=(old_log_prob - rollout).float(),
        advantages=torch.full_like(batch.advantages, sign),
    )
