"""Interface of the handover: an object that is sent with a batch and replaces a legacy actor's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

HANDOVER = "offpolicy_handover"
"""Key of the ``LegacyHandover`` in a DataProto's ``meta_info``."""
PREFIX = "offpolicy_"
"""Prefix of all columns that are sent in addition to those in the actor's own list."""
MINI_TOKENS = f"{PREFIX}batch_num_tokens"
"""Column, (B,) int64: number of response tokens in the row's mini-batch, summed over data-parallel ranks."""
MINI_ROWS = f"{PREFIX}global_batch_size"
"""Column, (B,) int64: number of rows in the row's mini-batch, summed over data-parallel ranks."""


class Update(Protocol):
    """One update of an actor; replaces the functions of ``core_algos`` that ``update_policy`` calls."""

    def begin(self, rows: Mapping[str, Any], *, scale: float) -> None:
        """Start a micro-batch before its loss is computed; the actor multiplies the loss by ``scale``."""

    def end(self, metrics: Mapping[str, Any]) -> None:
        """Complete the update's reports, which are part of the actor's metrics, before they leave the process."""

    def get_policy_loss_fn(self, original: Callable[..., Any], name: str) -> Callable[..., Any]: ...

    def agg_loss(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor: ...

    def kl_penalty(
        self, original: Callable[..., Tensor], logprob: Tensor, ref_logprob: Tensor, kl_penalty: str
    ) -> Tensor: ...


class LegacyHandover(Protocol):
    """Replacement for the loss of a legacy actor; sent by value once per batch."""

    @property
    def reads_rollout_log_probs(self) -> bool:
        """Return True if mu must be in the batch."""

    def update(self, actor_config: Any, *, dp_size: int, upstream: Callable[[], float]) -> Update:
        """Begin an update of an actor.

        Args:
            actor_config: verl's ActorConfig in the actor.
            dp_size: number of data-parallel ranks over which the actor averages gradients.
            upstream: returns the gradient from which the actor starts its backward pass; called after the start.
        """


def mini_batch_columns(
    response_mask: Tensor, mini_batch_rows: int, over_ranks: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Compute the denominators of each row's mini-batch, ``MINI_TOKENS`` and ``MINI_ROWS``, each (B,) int64.

    Args:
        response_mask: (B, T), the mask of this rank's rows, which are split in order into mini-batches.
        mini_batch_rows: number of rows of a mini-batch on one rank; the last mini-batch may have fewer.
        over_ranks: sums an int64 tensor over the data-parallel ranks.
    """
    pieces = response_mask.split(mini_batch_rows)
    counts = over_ranks(torch.tensor([[int(piece.bool().sum()), len(piece)] for piece in pieces], dtype=torch.int64))
    tokens, rows = counts.repeat_interleave(torch.tensor([len(piece) for piece in pieces]), dim=0).unbind(-1)
    return {MINI_TOKENS: tokens.contiguous(), MINI_ROWS: rows.contiguous()}
