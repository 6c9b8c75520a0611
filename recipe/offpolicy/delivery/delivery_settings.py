"""Parsing and validation of the keys ``offpolicy.delivery``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from ..batch.declared_keys import Section, count
from ..batch.shipped_defaults import read_shipped_defaults
from ..correction import Problem

SECTION = "offpolicy.delivery"


@dataclass(frozen=True)
class DeliverySettings:
    """How often it is proved that the rollout engine holds the trainer's weights.

    Attributes:
        sums: synchronisations from one comparison of checksums to the next; None: never.
        probe: synchronisations from one answer to the probe to the next; None: never.
    """

    sums: int | None
    probe: int | None

    @classmethod
    def from_config(cls, config: DictConfig) -> DeliverySettings:
        """Read the settings of a checked configuration."""
        return cls(**{**read_shipped_defaults("delivery"), **(OmegaConf.select(config, SECTION) or {})})


_EVERY = "a number of synchronisations, 1 or more, or null for never"
KEYS = Section(
    SECTION,
    read_shipped_defaults("delivery"),
    {"sums": count(_EVERY, null=True), "probe": count(_EVERY, null=True)},
)


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find what is wrong with the keys."""
    return KEYS.find_problems(config)
