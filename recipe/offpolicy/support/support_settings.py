"""The keys of the support's replay, as they stand under ``correction``."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from ..correction.correction_parts import SupportUnknown

SUPPORT = "correction.support"
SIZE = "correction.support_size"
ROLLOUT = "actor_rollout_ref.rollout"
DEFAULT_SIZE = 32
"""Ids asked for at each token where top-k does not say how many there can be."""
TIES = 4
"""Ids asked for beyond top-k, which keeps all that are as likely as its last."""


@dataclass(frozen=True)
class SupportSettings:
    """Replay of the support.

    Attributes:
        size: K, ids that are asked for at each token beside the sampled one.
        unknown: what becomes of a token whose support has more members: ``mask`` takes it out of the policy term,
            ``full`` renormalises nothing.
        min_p: of each request, which verl has no key for; None: none.
    """

    size: int
    unknown: SupportUnknown
    min_p: float | None = None

    @classmethod
    def from_config(cls, config: DictConfig) -> SupportSettings | None:
        """Read a configuration that passes the start-up checks; None where nothing is replayed."""
        if OmegaConf.select(config, SUPPORT) is None:
            return None
        size = OmegaConf.select(config, SIZE)
        return cls(
            size=choose_size(OmegaConf.select(config, f"{ROLLOUT}.top_k")) if size is None else int(size),
            unknown=OmegaConf.select(config, "correction.support_unknown", default="mask"),
            min_p=OmegaConf.select(config, "correction.support_min_p"),
        )


def choose_size(top_k: int | None) -> int:
    """Choose K by top-k, which is -1 or 0 where it is off.

    Example:
        >>> choose_size(5), choose_size(-1)
        (9, 32)
    """
    return top_k + TIES if top_k is not None and top_k > 0 else DEFAULT_SIZE
