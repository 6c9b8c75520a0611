"""Counts of replayed routes over the micro-batches of one mini-batch, kept on the device until its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .batch_routes import BatchRoutes
from .expert_choice import ChoiceRecord, ReplayError, equal_sets

OLDEST_BUCKET = 3
"""Last age group; it includes all higher ages."""
AGES = ("is0", "is1", "is2", "ge3")


@dataclass
class FirstLook:
    """Values that are measured once, in the first update.

    Attributes:
        checksums: number of rows whose routes were compared with the client's notes.
        tokens: number of response tokens over which k3 is summed.
        k3, k3_without: sums of k3(mu, pi) from a forward with the routes, and from a forward without them.
    """

    checksums: int = 0
    tokens: int = 0
    k3: float = 0.0
    k3_without: float = 0.0


@dataclass(frozen=True)
class RoutingReport:
    """Report of one rank on one mini-batch, in plain Python.

    Attributes:
        layers: absolute numbers of the layers with experts.
        top_k: number of experts per token.
        tokens: number of tokens of all forwards, without padding.
        replayed, entered, equal: by layer, see ``RoutedModel.count_entered``.
        ages: by ``AGES``, over all layers: (number of choices replayed, number of these that equal the router's own
            choice).
        withheld: number of tokens whose routes were too old to be replayed.
        size: bytes of the routes as received.
        gradients: sum of |gradient| of the routers' scores by layer; empty if it was not watched.
        first: measurements of the first update.
    """

    layers: tuple[int, ...]
    top_k: int
    tokens: int
    replayed: tuple[int, ...]
    entered: tuple[int, ...]
    equal: tuple[int, ...]
    ages: tuple[tuple[int, int], ...]
    withheld: int
    size: int
    gradients: tuple[float, ...] = ()
    first: FirstLook | None = None


@dataclass
class RoutingTally:
    """Sums over micro-batches.

    Args:
        layers: absolute numbers of the layers with experts.
        top_k: number of experts per token.
    """

    layers: tuple[int, ...]
    top_k: int
    tokens: int = 0
    size: int = 0
    _sums: list[Tensor] = field(default_factory=list)

    def add(self, tokens: int, routes: BatchRoutes, counts: Tensor, records: Mapping[int, ChoiceRecord]) -> None:
        """Add one forward.

        Args:
            tokens: number of tokens, without padding.
            counts: (layers, 3) of ``RoutedModel.count_entered``.
            records: records by layer.
        """
        self.tokens += tokens
        self.size += routes.size
        self._sums.append(torch.cat([counts.flatten(), _count_by_age(routes, records), routes.withheld[None]]))

    def report(self) -> RoutingReport:
        """Copy the counts to the host.

        Raises:
            ReplayError: experts of a layer were called with ids that differ from the shipped ones.
        """
        width = len(self.layers)
        sums = torch.stack(self._sums).sum(0).tolist() if self._sums else [0] * (3 * width + 2 * len(AGES) + 1)
        replayed, entered, equal = (tuple(sums[place : 3 * width : 3]) for place in range(3))
        for layer, wanted, found in zip(self.layers, replayed, entered, strict=True):
            if found != wanted:
                raise ReplayError(
                    f"the experts of layer {layer} were called with other ids than the shipped ones for "
                    f"{wanted - found} of {wanted} tokens. Fix: find the code that changes the router's choice between "
                    f"its forward and its experts, or turn routing replay off."
                )
        ages = sums[3 * width : -1]
        pairs = tuple(zip(ages[::2], ages[1::2], strict=True))
        return RoutingReport(
            *(self.layers, self.top_k, self.tokens, replayed, entered, equal, pairs),
            withheld=sums[-1],
            size=self.size,
        )


def _count_by_age(routes: BatchRoutes, records: Mapping[int, ChoiceRecord]) -> Tensor:
    """Count, (2 * AGES,), the choices replayed at each age, and those of them that equal the router's own."""
    replayed = torch.stack([record.replayed for record in records.values()])
    equal = torch.stack([equal_sets(record.ids, record.own) for record in records.values()]) & replayed
    pairs = torch.stack([replayed.sum(0), equal.sum(0)], -1)
    sums = pairs.new_zeros(len(AGES), 2)
    if routes.ages is not None:
        sums.index_add_(0, routes.ages.clamp(max=OLDEST_BUCKET), pairs)
    return sums.flatten()
