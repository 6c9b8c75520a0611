"""Reading verl's micro-batch and handing weights back: the one place that knows its keys and layouts.

verl 0.9.1 calls the engine's loss as ``loss_fn(model_output=..., data=TensorDict, dp_group=...)``. Response tensors
are nested by row on the V1 trainer and padded (B, T) on V0; ``model_output["log_probs"]`` is nested over prompt and
response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from .correction import CorrectionSpec, StepStage, rollout_stage, step_stage

ROLLOUT_LOG_PROBS = "rollout_log_probs"
WEIGHTS = "rollout_is_weights"  # what verl's ppo_loss multiplies into the policy term
_NEEDED = ("responses", "response_mask", "old_log_probs", "advantages", ROLLOUT_LOG_PROBS)


@dataclass(frozen=True)
class MicroBatch:
    """The padded (B, T) tensors of one micro-batch; ``log_prob`` carries the gradient, ``responses`` are token ids."""

    responses: Tensor
    response_mask: Tensor
    rollout_log_prob: Tensor
    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor


def read(model_output: Mapping[str, Any], data: TensorDict) -> MicroBatch:
    """The tensors that a correction needs, padded with zeros to the longest response of the micro-batch.

    Raises:
        KeyError: mu or another key is not in the micro-batch; the message says what to set.
    """
    for key in _NEEDED:
        if key not in data.keys():
            fix = (
                "set actor_rollout_ref.rollout.calculate_log_probs=true"
                if key == ROLLOUT_LOG_PROBS
                else "this path of verl does not ship it to the loss"
            )
            raise KeyError(f"{key} is not in the micro-batch that reached the loss: {fix}")
    dense = data.select(*_NEEDED).to_padded_tensor()
    return MicroBatch(
        responses=dense["responses"],
        response_mask=dense["response_mask"].bool(),
        rollout_log_prob=dense[ROLLOUT_LOG_PROBS],
        old_log_prob=dense["old_log_probs"],
        log_prob=padded(model_output, data),
        advantages=dense["advantages"],
    )


def decide(spec: CorrectionSpec, batch: MicroBatch) -> StepStage:
    """Both stages on one micro-batch."""
    stage = rollout_stage(
        spec,
        old_log_prob=batch.old_log_prob,
        rollout_log_prob=batch.rollout_log_prob,
        response_mask=batch.response_mask,
    )
    return step_stage(spec, stage, log_prob=batch.log_prob, advantages=batch.advantages)


def padded(model_output: Mapping[str, Any], data: TensorDict) -> Tensor:
    """log pi of the responses, (B, T), zeros on padding; differentiable."""
    return no_padding_2_padding(model_output["log_probs"], data)


def with_tensors(data: TensorDict, **tensors: Tensor | None) -> TensorDict:
    """A shallow copy of the micro-batch with padded (B, T) tensors put in; None removes the key."""
    changed = data.copy()
    for key, tensor in tensors.items():
        if tensor is not None:
            changed[key] = tensor
        elif key in changed.keys():
            del changed[key]
    return changed


def as_leaf(model_output: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """A detached copy of the model's output whose log-probs are a fresh leaf.

    Returns:
        The model output to hand to a loss, and the (total tokens,) leaf to take the gradient of.
    """
    log_probs = model_output["log_probs"]
    values = log_probs.values() if log_probs.is_nested else log_probs
    leaf = values.detach().clone().requires_grad_()
    copy = {key: value.detach() if isinstance(value, Tensor) else value for key, value in model_output.items()}
    copy["log_probs"] = (
        torch.nested.nested_tensor_from_jagged(leaf, log_probs.offsets()) if log_probs.is_nested else leaf
    )
    return copy, leaf


def flat(tensor: Tensor) -> Tensor:
    """The (total tokens,) values of a nested or flat tensor."""
    return tensor.values() if tensor.is_nested else tensor


def row_checksums(responses: Tensor, response_mask: Tensor, rollout_log_prob: Tensor) -> list[int]:
    """One 64-bit checksum a row over its response tokens and their mu, to the bit; padding is not read.

    It ties mu to the tokens it was sampled with: a shift, a permutation of rows, a cast or a replacement changes it.
    Rows without a response token are left out.

    Args:
        responses: (B, T) token ids.
        response_mask: (B, T) bool or 0/1.
        rollout_log_prob: (B, T) log mu, of any float dtype.
    """
    checksums = []
    for tokens, mask, mu in zip(responses.cpu(), response_mask.cpu().bool(), rollout_log_prob.cpu(), strict=True):
        if mask.any():
            content = tokens[mask].to(torch.int64).numpy().tobytes() + _bytes(mu[mask])
            checksums.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big"))
    return checksums


def sampled_checksums(data: TensorDict) -> list[int]:
    """``row_checksums`` of a rollout as verl stores it, nested or padded."""
    dense = data.select("responses", "response_mask", ROLLOUT_LOG_PROBS).to_padded_tensor()
    return row_checksums(dense["responses"], dense["response_mask"], dense[ROLLOUT_LOG_PROBS])


def _bytes(values: Tensor) -> bytes:
    return str(values.dtype).encode() + values.contiguous().view(torch.uint8).numpy().tobytes()
