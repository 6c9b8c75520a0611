"""A client's note of the routes of one row, sent in the row's extra fields.

A note is ``[tokens, checksum]``: the number of the row's tokens that the rollout engine forwarded, from the first on,
and a checksum of their routes. The last token of a response was sampled but never forwarded, so it has no routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NOTE = "offpolicy_routes"
"""Key of a row's note in its extra fields."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64


class RouteNote(list[int]):
    """The note of one row, with the tokens and routes behind it, which stay in the client's process."""

    def __init__(self) -> None:
        super().__init__([0, 0])
        self.tokens: list[int] = []
        self.routes: Tensor | None = None

    # verl sends the routes in its own column.
    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def keep_sampled(self, tokens: Sequence[int], routes: Tensor) -> Tensor:
        """Join the routes of a further request of the row to those that its earlier tokens were sampled with.

        A later turn forwards the earlier tokens again, in other batches or with newer weights, so its routes for them
        differ from the ones that they were sampled with.

        Args:
            tokens: ids of the request: its prompt and its response.
            routes: (n, layers, k) of its first n tokens.

        Returns:
            (n, layers, k): earlier routes while the tokens are the same, then the given ones.
        """
        if self.routes is not None:
            shared = count_shared(self.tokens, tokens, min(len(self.routes), len(routes)))
            routes = torch.cat([self.routes[:shared], routes[shared:]])
        self.tokens, self.routes = list(tokens), routes
        self[:] = [len(routes), hash_routes(routes)]
        return routes


def count_shared(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """Count the common leading tokens of two sequences, up to ``most``.

    Example:
        >>> count_shared([5, 6, 7], [5, 6, 8, 9], 3), count_shared([5, 6, 7], [5, 6, 7], 2)
        (2, 2)
    """
    pairs = zip(first[:most], second[:most], strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(most, len(first), len(second)))


def hash_routes(routes: Tensor) -> int:
    """Compute the checksum of one row's routes, (n, layers, k) of any integer dtype."""
    return int(hash_tokens(routes, torch.arange(len(routes))).sum()) if len(routes) else 0


def hash_tokens(routes: Tensor, places: Tensor) -> Tensor:
    """Compute each token's part of its row's checksum; it depends on expert, layer, order and position.

    Args:
        routes: (tokens, layers, k) integers.
        places: (tokens,) int64, the token's position in its row.

    Returns:
        (tokens,) int64, to be summed over a row; wraps around.
    """
    ids = routes.flatten(1).long() + 1
    columns = _spread(torch.arange(ids.shape[1], device=ids.device) + 1)
    return (ids * columns).sum(-1) * _spread(places.to(ids.device) + 1)


def _spread(number: Tensor) -> Tensor:
    """Spread small numbers over 64 bits; odd."""
    mixed = number * _ODD
    return ((mixed ^ (mixed >> 29)) * _FIRST) | 1
