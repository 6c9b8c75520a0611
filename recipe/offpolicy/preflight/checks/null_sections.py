"""Check for sections of verl's configuration that are null, on which every other check would fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...correction.problem import Problem
from .config_reader import ACTOR, ROLLOUT

_SECTIONS = (
    "actor_rollout_ref",
    "actor_rollout_ref.model",
    ACTOR,
    f"{ACTOR}.policy_loss",
    ROLLOUT,
    "algorithm",
    "data",
    "ray_kwargs",
    "trainer",
)
_OF_V1 = ("trainer.v1",)


def find_null_sections(config: DictConfig) -> Iterator[Problem]:
    """Find null sections; call it before any other check."""
    of_v1 = _OF_V1 if OmegaConf.select(config, "trainer.use_v1") else ()
    for key in (*_SECTIONS, *of_v1):
        owner, _, name = key.rpartition(".")
        node = _select(config, owner) if owner else config
        if isinstance(node, DictConfig) and name in node and not isinstance(_select(node, name), DictConfig):
            reason = "this section of verl's configuration holds keys that every launch reads."
            yield Problem(key, node._get_node(name)._value(), reason, "Remove this override.")  # type: ignore[union-attr]


def find_missing_actor(config: DictConfig) -> Iterator[Problem]:
    """Find out whether another program than verl's PPO, such as its SFT, was given an option of ours."""
    owner, _, name = ACTOR.rpartition(".")
    section = _select(config, owner) if owner in config else {}
    if isinstance(section, Mapping) and name not in section:
        reason = "the program does not train by verl's PPO, and has no policy gradient to correct."
        yield Problem(ACTOR, None, reason, "Launch it without a correction.", parts=())


def _select(config: DictConfig, key: str) -> object:
    """Return the value at a key; None for an unresolved interpolation."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None
