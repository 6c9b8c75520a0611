"""What a rank saw of Megatron's routers in one mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

REPORT = "offpolicy_megatron_routing"
"""Key of the ``MegatronReport`` in the metrics of an update."""


@dataclass(frozen=True)
class MegatronReport:
    """Routes that one rank replayed in one mini-batch, all of them where its routers sent the tokens.

    Attributes:
        layers: numbers of the layers with routers on this rank, from 0.
        tokens: of them whose routes were replayed, in each layer.
        forwarded: tokens of the rank's forwards, padding included.
        placed: replayed ids were compared with the shipped ones by layer and token as well, which is not done where
            tokens are split over ranks.
    """

    layers: tuple[int, ...]
    tokens: int
    forwarded: int
    placed: bool
