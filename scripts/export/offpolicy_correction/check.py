"""Checks at every update that the correction reaches the gradient, and before the first update that each bound acts.

``watch`` compares the gradient that arrives at the log-probs in the engine's backward pass with weight * keep * verl's
own gradient. If mu equals pi_old, a correction that does nothing also passes this check. Therefore, ``try_parts`` also
moves mu across each bound, where the expected factor can be computed from the bound alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from .correction import Correction, Mask, Weight

if TYPE_CHECKING:
    from .loss import Batch, CorrectedLoss

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest relative error of a gradient, by the dtype of the log-probs."""
MARGIN = 0.02
"""Distance of a trial value from a bound, as a share of the bound's log."""


class NotLive(RuntimeError):
    """The correction does not act on the gradient as configured."""


def watch(
    loss_fn: CorrectedLoss,
    model_output: Mapping[str, Any],
    data: TensorDict,
    batch: Batch,
    factor: Tensor,
    loss: Tensor,
) -> Metric:
    """Compare the gradient in the next backward pass with the expected gradient.

    Returns:
        Number of compared tokens at which the policy term has a gradient; filled in during the backward pass.

    Raises:
        NotLive: the gradients differ; raised in the backward pass, before the optimizer steps.
    """
    expected, policy = _expect(loss_fn, model_output, data, batch, factor)
    scale = torch.maximum(expected.abs().max(), policy.abs().max())
    compared = Metric(AggregationType.SUM, 0.0)
    upstream: list[Tensor] = []

    def at_loss(gradient: Tensor) -> None:
        upstream.append(gradient.detach())

    def at_log_probs(gradient: Tensor) -> None:
        if not upstream:
            raise NotLive("the log-probs receive a gradient that does not come from this loss.")
        _demand("the update", _flat(gradient.detach()), expected * upstream[-1], scale * upstream[-1].abs())
        compared.values[0] = float((policy != 0).sum())

    loss.register_hook(at_loss)
    model_output["log_probs"].register_hook(at_log_probs)
    return compared


def try_parts(loss_fn: CorrectedLoss, model_output: Mapping[str, Any], data: TensorDict, batch: Batch) -> None:
    """Run the loss with each part alone, with mu just inside and just beyond each of its bounds.

    Raises:
        NotLive: a part does not act as its bounds require.
    """
    correction = loss_fn.correction
    parts = {"weight": Correction(weight=correction.weight)} if correction.weight is not None else {}
    parts |= {f"masks.{name}": Correction(masks={name: mask}) for name, mask in correction.masks.items()}
    counts = batch.response_mask.sum(-1, keepdim=True).clamp(min=1)
    pi = batch.log_prob.detach().double()
    for name, part in parts.items():
        alone = copy.copy(loss_fn)
        alone.correction, alone.tried = part, True
        only = part.weight or next(iter(part.masks.values()))
        seen = False
        for log_ratio, advantage, demanded in list_trials(only):
            shared = only.level == "sequence" and only.aggregate == "product"
            step = log_ratio / counts if shared else torch.full_like(pi[:, :1], log_ratio)
            moved = replace(
                batch,
                old_log_probs=pi,
                rollout_log_probs=pi - step,
                advantages=torch.full_like(batch.advantages, advantage),
            )
            output, leaf = _leaf(model_output)
            factor, _ = alone.compute_factor(replace(moved, log_prob=no_padding_2_padding(output["log_probs"], data)))
            loss, _ = alone.repeat_loss(output, data, moved, factor)
            (found,) = torch.autograd.grad(loss, leaf)
            right = torch.full_like(pi, demanded) * batch.response_mask
            expected, policy = _expect(alone, model_output, data, moved, right)
            _demand(f"correction.{name} at log r = {log_ratio:.4g}", found, expected, policy.abs().max())
            seen = seen or bool(policy.any())
        if not seen:
            mode = loss_fn.actor_config.policy_loss.get("loss_mode", "vanilla")
            raise NotLive(f"actor.policy_loss.loss_mode={mode} ignores the weights. Set vanilla or another mode.")


def list_trials(part: Weight | Mask) -> Iterator[tuple[float, float, float]]:
    """List the trials: log-ratio of each unit, advantage of all tokens, and the factor that the bound requires."""
    rejects = isinstance(part, Mask) or part.kind == "reject"
    when = part.when if isinstance(part, Mask) else "any"
    advantage = -1.0 if when == "negative" else 1.0
    if part.log_bounds == (-math.inf, math.inf):
        yield 0.1, advantage, math.exp(0.1)
    for outward, bound in zip((-1.0, 1.0), part.log_bounds, strict=True):
        if math.isinf(bound):
            continue
        margin = MARGIN * max(abs(bound), 1e-3)
        inside, beyond = bound - outward * margin, bound + outward * margin
        weight = isinstance(part, Weight)
        # If bounds are narrow, a value just inside one bound could lie beyond the other.
        if part.log_bounds[0] <= inside <= part.log_bounds[1]:
            yield inside, advantage, math.exp(inside) if weight else 1.0
        yield beyond, advantage, 0.0 if rejects else math.exp(bound)
        if when != "any":
            yield beyond, -advantage, 1.0


def _expect(
    loss_fn: CorrectedLoss, model_output: Mapping[str, Any], data: TensorDict, batch: Batch, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradient that ``factor`` requires, and the gradient of the uncorrected policy term, each flat.

    The factor multiplies only the policy term, so the gradient is factor * (g(1) - g(0)) + g(0), where g(c) is verl's
    gradient under constant weights c, and g(0) is the gradient of the KL and entropy terms.
    """
    gradients = []
    for constant in (0.0, 1.0):
        output, leaf = _leaf(model_output)
        weights = torch.full_like(factor, constant) * batch.response_mask
        loss, _ = loss_fn.repeat_loss(output, data, batch, weights)
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    output, leaf = _leaf(model_output)
    padded = no_padding_2_padding(output["log_probs"], data)
    (placed,) = torch.autograd.grad((padded * factor).sum(), leaf)  # the factor at the flat log-prob of its token
    rest, whole = gradients
    return placed * (whole - rest) + rest, whole - rest


def _leaf(model_output: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Copy the model output, detached, with the log-probs as a new flat leaf."""
    log_probs = model_output["log_probs"]
    leaf = _flat(log_probs).detach().clone().requires_grad_()
    output = {key: each.detach() if isinstance(each, Tensor) else each for key, each in model_output.items()}
    nested = log_probs.is_nested
    output["log_probs"] = torch.nested.nested_tensor_from_jagged(leaf, log_probs.offsets()) if nested else leaf
    return output, leaf


def _flat(tensor: Tensor) -> Tensor:
    return tensor.values() if tensor.is_nested else tensor


def _demand(what: str, found: Tensor, expected: Tensor, scale: Tensor) -> None:
    error = float((found - expected).abs().max())
    limit = TOLERANCE.get(found.dtype, TOLERANCE[torch.float32]) * float(scale)
    if not error <= limit:  # also for NaN
        raise NotLive(
            f"{what}: the gradient differs by {error:.3g} from weight * keep * verl's own gradient; the "
            f"limit is {limit:.3g}."
        )
