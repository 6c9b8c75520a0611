"""Adds this package's sections to the configuration of each Hydra program that selects one of its options.

An option such as ``+correction@correction=gsm`` needs the sections that ``offpolicy_base.yaml`` declares. Hydra
composes the entries of a defaults list in order. A group on the command line is composed last, so its sections would
overwrite values of the user's primary configuration. The sections are therefore inserted before all entries except
Hydra's own node.

configs/platform/cuda.yaml uses ``${if_flash_attn:A,B}``, which resolves to A if the launching process can import
flash-attn, and to B otherwise. A launch replaces these interpolations with their values, because workers cannot resolve
them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .contract import Contract, PatchError, wrap
from .moved_options import explain_moved

PROVIDER = "offpolicy"
"""Name of this package's folder in Hydra's search path."""
GROUPS = (
    *("correction", "ess_lr", "length_penalty", "offpolicy"),
    *("opd", "optimal_baseline", "pass_at_k", "process_reward", "turn_credit"),
)
"""Groups whose options need these sections."""
SECTIONS = "offpolicy_base"
_OF_FSDP = "router_replay/dp"
_ROLLOUT = "offpolicy_rollout"
RESOLVER = "if_flash_attn"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"
CALLBACK = {"_target_": "recipe.offpolicy.launch_callback.LaunchCallback"}

COMPOSE = Contract(
    "sections",
    "hydra._internal.config_loader_impl:ConfigLoaderImpl._compose_config_from_defaults_list",
    "(self, defaults, repo)",
    "hydra-core",
    ">=1.3,<1.4",
)
LOAD = Contract(
    "former names of options",
    "hydra._internal.config_loader_impl:ConfigLoaderImpl._load_configuration_impl",
    "(self, config_name, overrides, ...)",
    "hydra-core",
    ">=1.3,<1.4",
)


def find_folder() -> Path:
    """Find the folder of the configuration groups: ``configs/`` of this checkout, or its copy in an installation."""
    spec = importlib.util.find_spec("recipe.offpolicy")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise PatchError(
            "the package recipe.offpolicy, which contains the configuration groups, was not found. Fix: reinstall it."
        )
    return Path(folders[0]) / "config"


def bring_sections() -> None:
    """Add the sections whenever one of the options is selected, and explain former names of options. Idempotent.

    This also registers the interpolation that configs/platform/cuda.yaml uses.

    Raises:
        PatchError: the Hydra function that composes configurations has changed.
    """
    wrap(COMPOSE, _compose)
    wrap(LOAD, _load)
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver(
        RESOLVER, lambda yes, no: no if explain_missing_flash_attention() else yes, replace=True
    )


def _load(
    original: Callable[..., Any], loader: Any, config_name: Any, overrides: Sequence[str], *more: Any, **named: Any
) -> Any:
    from hydra.errors import MissingConfigException

    try:
        return original(loader, config_name, overrides, *more, **named)
    except MissingConfigException as error:
        if said := explain_moved(error.missing_cfg_file, overrides):
            raise MissingConfigException(said, error.missing_cfg_file, error.options) from None
        raise


def _compose(original: Callable[..., Any], loader: Any, defaults: Sequence[Any], repo: Any) -> Any:
    if not _needs_sections(defaults, repo):
        return original(loader, defaults, repo)
    from hydra.core.default_element import ResultDefault
    from omegaconf import open_dict

    of_hydra = [each for each in defaults if str(each.package or "").split(".")[0] == "hydra"]
    others = [each for each in defaults if each not in of_hydra]
    names = [SECTIONS, *([_OF_FSDP] if any(each.config_path == "actor/dp_actor" for each in others) else [])]
    ours = [ResultDefault(config_path=name, parent="<root>", package=_package_of(name)) for name in names]
    # Insert the sections before the primary file's own values, and after the defaults that this file lists.
    own = next((at for at, each in enumerate(others) if each.primary), len(others))
    rollout = ResultDefault(config_path=_ROLLOUT, parent="<root>", package="")
    config = original(loader, [*of_hydra, *ours, *others[:own], rollout, *others[own:]], repo)
    with open_dict(config):
        config.hydra.callbacks["offpolicy"] = dict(CALLBACK)
    return config


def _package_of(name: str) -> str:
    return "actor_rollout_ref.actor.fsdp_config" if name == _OF_FSDP else ""


def _needs_sections(defaults: Sequence[Any], repo: Any) -> bool:
    """Return True if one of the options is selected and the primary configuration does not include the sections."""
    paths = [str(each.config_path or "") for each in defaults]
    others = [path for each, path in zip(defaults, paths, strict=True) if not each.primary]
    chosen = [path for path in others if path.partition("/")[0] in GROUPS and "/" in path]
    if SECTIONS in paths or not chosen:
        return False
    loaded = (repo.load_config(path) for path in chosen)
    # In this package's own program, the sections come from the main configuration folder.
    folder = find_folder().resolve()
    return any(each is not None and Path(each.path.removeprefix("file://")).resolve() == folder for each in loaded)


@functools.cache
def explain_missing_flash_attention() -> str:
    """Explain why flash-attn cannot be imported, e.g. because it was built for another torch; empty if it can."""
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_attn":
            return "flash-attn is not installed"
        return f"flash-attn cannot be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return ""


def settle_flash_attention(config: Any) -> list[str]:
    """Replace the interpolations of a launch with their values, in place; return one line that lists the values."""
    from omegaconf import DictConfig, OmegaConf

    def asks(key: str) -> bool:
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(config, parent)
        return isinstance(node, DictConfig) and name in node and OmegaConf.is_interpolation(node, name)

    if not (open_keys := [key for key in (ATTENTION, REMOVE_PADDING) if asks(key)]):
        return []
    for key in open_keys:
        OmegaConf.update(config, key, OmegaConf.select(config, key))
    missing = explain_missing_flash_attention()
    values = ", ".join(f"{key.rpartition('.')[2]}={str(OmegaConf.select(config, key)).lower()}" for key in open_keys)
    return [f"{values}: {missing or f'flash-attn {_find_version()} is installed'}"]


def _find_version() -> str:
    try:
        return importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
