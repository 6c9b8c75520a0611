"""Log-probs under a softmax that is renormalised over a support, as in truncated sampling."""

from __future__ import annotations

import torch
from torch import Tensor


class SupportError(RuntimeError):
    """The support of truncated sampling is missing, incomplete or belongs to other tokens."""


def compute_truncated_log_probs(
    logits: Tensor, places: Tensor, tokens: Tensor, ids: Tensor, temperature: Tensor
) -> Tensor:
    """Compute log p(token) - log p(support) from the logits alone: z(token) - logsumexp of z over the support.

    The logits are divided by the temperature first, in vLLM's order. The gradient reaches only the token's logit and
    those of its support.

    Args:
        logits: (N, V) float.
        places: (m,) int64, the row of ``logits`` from which each token was sampled.
        tokens: (m,) int64.
        ids: (m, K) integers, the support of each token in any order, padded with -1; K may be 0 if m is.
        temperature: (m,) float.

    Returns:
        (m,) float32, or float64 for float64 logits. Above 0 where a token is not in its support.

    Example:
        >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
        >>> at, token, ids = torch.tensor([0]), torch.tensor([1]), torch.tensor([[0, 1, -1]])
        >>> compute_truncated_log_probs(logits, at, token, ids, torch.ones(1)).exp()
        tensor([0.3333])
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scale = temperature.to(dtype).clamp(min=1e-8)
    inside = ids >= 0
    # Gathered before the cast, so no tensor of vocabulary size is created.
    of_support = logits[places[:, None], ids.clamp(min=0).long()].to(dtype) / scale[:, None]
    own = logits[places, tokens].to(dtype) / scale
    return own - of_support.masked_fill(~inside, -torch.inf).logsumexp(-1)


def find_inside(tokens: Tensor, ids: Tensor) -> Tensor:
    """Flag the tokens, (m,) bool, that are in their support.

    Args:
        tokens: (m,) integers.
        ids: (m, K) integers, padded with -1.
    """
    return (ids == tokens[:, None]).any(-1)
