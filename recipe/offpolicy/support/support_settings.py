"""The keys of support replay, below ``correction``."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from ..correction.correction_parts import SupportUnknown

SUPPORT = "correction.support"
CENTERING = "correction.centering"
SIZE = "correction.support_size"
ROLLOUT = "actor_rollout_ref.rollout"
DEFAULT_SIZE = 32
"""Ids requested per token if top-k does not bound the support."""
TIES = 4
"""Ids requested beyond top-k, which keeps ties with its last id."""


@dataclass(frozen=True)
class SupportSettings:
    """Settings of support replay.

    Attributes:
        size: K, number of ids requested per token in addition to the sampled one.
        unknown: treatment of a token whose support has more ids: ``mask`` removes it from the policy term, ``full``
            does not renormalise it.
        min_p: min-p of each request, for which verl has no key; None: none.
        likeliest: the ids are requested with their log-probs, for score centering.
    """

    size: int
    unknown: SupportUnknown
    min_p: float | None = None
    likeliest: bool = False

    @classmethod
    def from_config(cls, config: DictConfig) -> SupportSettings | None:
        """Read a configuration that passed the start-up checks; None if nothing is replayed."""
        if OmegaConf.select(config, SUPPORT) is None:
            return None
        size = OmegaConf.select(config, SIZE)
        return cls(
            size=choose_size(OmegaConf.select(config, f"{ROLLOUT}.top_k")) if size is None else int(size),
            unknown=OmegaConf.select(config, "correction.support_unknown", default="mask"),
            min_p=OmegaConf.select(config, "correction.support_min_p"),
        )

    @classmethod
    def for_centering(cls, config: DictConfig) -> SupportSettings | None:
        """Read what score centering requests; None if nothing is centred."""
        size = OmegaConf.select(config, CENTERING)
        return None if size is None else cls(size=int(size), unknown="full", likeliest=True)


def choose_size(top_k: int | None) -> int:
    """Choose K from top-k, which is -1 or 0 if it is off.

    Example:
        >>> choose_size(5), choose_size(-1)
        (9, 32)
    """
    return top_k + TIES if top_k is not None and top_k > 0 else DEFAULT_SIZE
