"""A plugin with a fixture for tests that examine many configurations of few actors."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


@pytest.fixture(scope="module")
def each_actor_is_probed_once() -> Iterator[None]:
    """Cache, by their arguments, the probe of the base loss, verl's dataclasses and the installed releases."""
    import verl.utils.config
    from recipe.offpolicy.preflight.checks import base_loss
    from verl_patches import contract

    verdicts: dict[tuple[str, bool], str | None] = {}
    probe = base_loss.probe

    def remembered(actor: Any, *, split: bool = True) -> str | None:
        if (key := (repr(actor), split)) not in verdicts:
            verdicts[key] = probe(actor, split=split)
        return verdicts[key]

    built: dict[tuple[str, Any], Any] = {}
    build = verl.utils.config.omega_conf_to_dataclass

    def built_once(config: Any, dataclass_type: Any = None) -> Any:
        if not config or not OmegaConf.is_config(config):
            return build(config, dataclass_type)
        try:
            key = repr(OmegaConf.to_container(config, resolve=True)), dataclass_type
        except OmegaConfBaseException:  # which verl's own way words otherwise
            return build(config, dataclass_type)
        if key not in built:
            built[key] = build(config, dataclass_type)
        return copy.deepcopy(built[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_loss, "probe", remembered)
        patch.setattr(verl.utils.config, "omega_conf_to_dataclass", built_once)
        patch.setattr(importlib.metadata, "version", functools.cache(importlib.metadata.version))
        patch.setattr(contract, "_release_beside", functools.cache(contract._release_beside))
        yield
