"""Readers of a composed configuration."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from recipe.offpolicy.preflight.checks.config_reader import copy_config


def test_a_copy_keeps_interpolations_and_what_is_locked_and_shares_nothing() -> None:
    config = OmegaConf.create({"data": {"n": 3}, "actor": {"n": "${data.n}", "list": [1]}})
    OmegaConf.set_struct(config, True)
    copied = copy_config(config)
    assert OmegaConf.to_container(copied, resolve=False) == OmegaConf.to_container(config, resolve=False)
    copied.data.n = 4
    copied.actor.list.append(2)
    assert (copied.actor.n, config.actor.n, config.actor.list) == (4, 3, [1])
    with pytest.raises(ConfigAttributeError):
        copied.data.other = 1
