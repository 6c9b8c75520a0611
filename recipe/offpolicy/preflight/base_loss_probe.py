"""Probe of verl's configured policy loss: checks that it applies weight x keep as a correction requires.

A correction multiplies the policy term of each token, so with f = weight x keep, the loss must satisfy dL/dlog_prob = f
x dL_uncorrected/dlog_prob, and neither loss nor gradient may depend on how a mini-batch is split into micro-batches.
Both conditions are tested on a small synthetic batch before Ray starts.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from ..batch import micro_batch as mb
from ..batch.padding import with_tensors

_TOLERANCE = 1e-6  # relative, in float64
_LENGTHS = (7, 3, 5, 1, 6, 4)  # rows of different lengths, because a split must not change the result


def probe(actor_config: Any, *, split: bool = True) -> str | None:
    """Test the policy loss of ``actor_config`` (verl's ActorConfig) on a small synthetic batch.

    Args:
        split: whether to also test that the loss does not depend on the split into micro-batches.

    Returns:
        None if the loss applies weights as intended; otherwise a sentence that describes what it does instead.
    """
    # devices=[]: by default, fork_rng saves the state of every GPU, which would initialise CUDA in the launcher.
    with torch.random.fork_rng(devices=[]):
        return _probe(copy.deepcopy(actor_config), split)


def _probe(actor_config: Any, split: bool) -> str | None:
    batch, factor = _build_batch(torch.Generator().manual_seed(0))
    ones = torch.ones_like(factor)
    plain_loss, plain = _run(actor_config, batch, ones)
    _, weighted = _run(actor_config, batch, factor)
    # The contribution of terms that weights must not change, such as KL.
    _, rest = _run(actor_config, batch, torch.zeros_like(factor))
    if _is_close(plain, rest):
        return "it ignores the weights that it is given"
    if not _is_close(weighted - rest, factor * (plain - rest)):
        return "its gradient under weights w is not w times its gradient without weights"
    if split:
        split_loss, gradient = _run(actor_config, batch, ones, pieces=(2, 3, 1))
        if not (_is_close(gradient, plain) and _is_close(split_loss, plain_loss)):
            return "its loss or gradient changes with the split into micro-batches"
    return None


def _build_batch(generator: torch.Generator) -> tuple[TensorDict, Tensor]:
    rows, width = len(_LENGTHS), max(_LENGTHS)
    mask = torch.arange(width)[None, :] < torch.tensor(_LENGTHS)[:, None]
    prompt = torch.ones(rows, 1, dtype=torch.int64)

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    log_prob = -normal().abs() - 0.5  # a log-prob is negative
    batch = TensorDict(
        {
            "prompts": prompt,
            "responses": torch.ones(rows, width, dtype=torch.int64),
            "attention_mask": torch.cat([prompt, mask.long()], dim=-1),
            "response_mask": mask.long(),
            "log_prob": log_prob,
            # Some ratios pi / pi_old lie inside PPO's clip range and some outside it.
            "old_log_probs": log_prob + 0.2 * normal(),
            # Some losses select tokens by their covariance with the advantage; these values are large enough for that.
            "advantages": 3.0 * normal()[:, :1].expand(rows, width).contiguous(),
            "ref_log_prob": log_prob + 0.1 * normal(),
        },
        batch_size=rows,
    )
    factor = 2.0 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    factor[1] = 0.0  # a masked row
    return batch, factor * mask


def _run(
    actor_config: Any, batch: TensorDict, factor: Tensor, pieces: tuple[int, ...] = (len(_LENGTHS),)
) -> tuple[Tensor, Tensor]:
    """Compute the summed loss, and the (B, T) gradient of the policy term at log_prob, with these micro-batches."""
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    start = 0
    for size in pieces:
        torch.manual_seed(0)  # some losses select tokens at random
        rows = slice(start, start + size)
        piece = with_tensors(batch[rows], **{mb.WEIGHTS: factor[rows]})
        tu.assign_non_tensor(
            piece,
            dp_size=1,
            batch_num_tokens=int(batch["response_mask"].sum()),
            global_batch_size=len(_LENGTHS),
        )
        mask = piece["response_mask"].bool()
        # verl's layout: log-probs flat over prompt and response, shifted left by one token.
        model_output = {"log_probs": torch.cat([_shift(r[m]) for r, m in zip(log_prob[rows], mask, strict=True)])}
        # Each piece is padded to its longest row, as in a run.
        loss = loss + ppo_loss(actor_config, model_output, _trim(piece))[0]
        start += size
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


def _shift(response: Tensor) -> Tensor:
    return torch.cat([response, response.new_zeros(1)])


def _trim(piece: TensorDict) -> TensorDict:
    width = int(piece["response_mask"].sum(-1).max())
    trimmed = piece.copy()
    for key, value in piece.items():
        if isinstance(value, Tensor) and key not in {"prompts", "attention_mask"}:
            trimmed[key] = value[:, :width]
    trimmed["attention_mask"] = piece["attention_mask"][:, : width + 1]
    return trimmed


def _is_close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())
