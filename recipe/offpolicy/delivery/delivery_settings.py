"""Parsing and validation of the keys ``offpolicy.delivery``."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from ..batch.declared_keys import Section, count, read_shipped_defaults

SECTION = "offpolicy.delivery"
LEAST_SEEN = 0.5
"""Updates count as rounded away if less than this share of them survives rounding to the engine's dtype."""
FIX_ROUNDED = "actor_rollout_ref.rollout.dtype=float32, or a larger actor_rollout_ref.actor.optim.lr"


@dataclass(frozen=True)
class DeliverySettings:
    """How often the rollout engine's weights are compared with the trainer's.

    Attributes:
        sums: number of synchronisations from one comparison of checksums to the next; None for never.
        probe: number of synchronisations from one probe to the next; None for never.
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


find_problems = KEYS.find_problems
"""Find invalid values of ``offpolicy.delivery``."""
