"""Report of one rank on Megatron's routers in one mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

REPORT = "offpolicy_megatron_routing"
"""Key of the ``MegatronReport`` in the metrics of an update."""


@dataclass(frozen=True)
class MegatronReport:
    """Routes that one rank replayed in one mini-batch; its routers followed all of them.

    Attributes:
        layers: numbers of the layers with routers on this rank, from 0.
        tokens: number of tokens whose routes were replayed, in each layer.
        forwarded: number of tokens of the rank's forwards, padding included.
        placed: True if replayed ids were also compared with the shipped ones by layer and token; not possible if
            tokens are split over ranks.
    """

    layers: tuple[int, ...]
    tokens: int
    forwarded: int
    placed: bool
