"""Configuration values that depend on flash-attn: configs/platform/cuda.yaml uses flash-attn if it can be imported.

``${if_flash_attn:A,B}`` is A if the launching process can import flash-attn, otherwise B. A launch replaces these
interpolations with their values, because its workers cannot resolve them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Any

RESOLVER = "if_flash_attn"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"


@functools.cache
def explain_missing() -> str:
    """Explain why flash-attn cannot be imported, e.g. because it was built for another torch; empty if it can."""
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_attn":
            return "flash-attn is not installed"
        return f"flash-attn cannot be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return ""


def register() -> None:
    """Make the interpolation known to OmegaConf in this process. Idempotent."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver(RESOLVER, lambda yes, no: no if explain_missing() else yes, replace=True)


def settle(config: Any) -> list[str]:
    """Replace the interpolations of a launch with their values, in place; return a line that shows the values."""
    from omegaconf import DictConfig, OmegaConf

    def asks(key: str) -> bool:
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(config, parent)
        return isinstance(node, DictConfig) and name in node and OmegaConf.is_interpolation(node, name)

    if not (open_keys := [key for key in (ATTENTION, REMOVE_PADDING) if asks(key)]):
        return []
    for key in open_keys:
        OmegaConf.update(config, key, OmegaConf.select(config, key))
    missing = explain_missing()
    values = ", ".join(f"{key.rpartition('.')[2]}={str(OmegaConf.select(config, key)).lower()}" for key in open_keys)
    return [f"{values}: {missing or f'flash-attn {_find_version()} is installed'}"]


def _find_version() -> str:
    try:
        return importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
