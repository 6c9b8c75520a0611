"""Overrides applied to a composed configuration, as Hydra would apply them after those of the launch."""

from __future__ import annotations

from collections.abc import Iterable

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.offpolicy.preflight.composed import copy_config


def with_overrides(config: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """Return a copy; fail, as Hydra would, on missing keys that are set without ``+``."""
    config = copy_config(config)
    missing = object()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        there = OmegaConf.select(config, override.key_or_group, default=missing, throw_on_missing=False)
        owner, _, name = override.key_or_group.rpartition(".")
        node = OmegaConf.select(config, owner)
        is_there = there is not missing or (isinstance(node, DictConfig) and name in node)
        if override.is_delete():
            assert there not in (missing, None), f"{override.input_line}: there is no such key"
            with open_dict(config):
                del node[name]
            continue
        assert is_there or override.is_add() or override.is_force_add(), f"{override.input_line}: there is no such key"
        OmegaConf.update(config, override.key_or_group, override.value(), merge=False, force_add=True)
    return config
