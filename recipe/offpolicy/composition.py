"""What Hydra's composition hides: a correction group that is deleted, and two options that set one key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from .correction import SpecError

GROUP = "correction"
_NULL = "correction=null: nothing says what is meant. Set correction=none to train uncorrected."


def own_keys_for_us(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments in which Hydra leaves unknown keys of ours to our own checks.

    ``correction.masks.gsm.low=1`` becomes ``++correction.masks.gsm.low=1``, so that the answer is the known keys
    instead of the advice to append an unknown one.

    Raises:
        SpecError: ``correction=null``, on which Hydra fails without naming the key, or two ``correction=``, of which
            Hydra would take the last.
    """
    bare = [argument.replace(" ", "") for argument in arguments]
    chosen = [argument for argument in bare if argument.startswith(f"{GROUP}=")]
    if any(argument.lower() in {"correction=null", "correction="} for argument in chosen):
        raise SpecError(_NULL)
    if len(chosen) > 1:
        raise SpecError(f"{' '.join(chosen)}: given {len(chosen)} times. Stack options as 'correction=[one,other]'.")
    return [f"++{a}" if a.startswith((f"{GROUP}.", "offpolicy.")) else a for a in arguments]


def chosen_options() -> list[str]:
    """The options of the group ``correction`` in the running Hydra application, e.g. ["tis_token", "opsm"].

    Raises:
        SpecError: the group was deleted.
    """
    config = HydraConfig.get()
    loader: Any = GlobalHydra.instance().config_loader()
    defaults: list[ResultDefault] = loader.compute_defaults_list(
        config_name=config.job.config_name,
        overrides=[*config.overrides.hydra, *config.overrides.task],
        run_mode=RunMode.RUN,
    ).defaults
    paths = [default.config_path or "" for default in defaults]
    options = [path.removeprefix(f"{GROUP}/") for path in paths if path.startswith(f"{GROUP}/")]
    if not options:
        raise SpecError(_NULL)
    return options


def check_stack(options: Sequence[str]) -> None:
    """Two options that set one key: Hydra lets the last one win, here it is an error.

    Raises:
        SpecError: names the key and both options.
    """
    if "none" in options and len(options) > 1:
        raise SpecError(f"correction=[{','.join(options)}]: none with others. Leave none out, or choose it alone.")
    repository = _repository()
    owner: dict[str, str] = {}
    for option in options:
        loaded = repository.load_config(f"{GROUP}/{option}")
        assert loaded is not None, f"{GROUP}/{option} was composed a moment ago"
        leaves = list(_leaves(loaded.config))
        for key in leaves:
            for seen, first in owner.items():
                if key == seen or key.startswith(f"{seen}.") or seen.startswith(f"{key}."):
                    raise SpecError(
                        f"correction=[{','.join(options)}]: {first} and {option} both set {GROUP}.{key}. "
                        f"Choose one of them."
                    )
        owner.update(dict.fromkeys(leaves, option))


def _repository() -> ConfigRepository:
    """Every place that options come from; the loader's own repository leaves out ``hydra.searchpath``."""
    search_path = ConfigSearchPathImpl()
    for source in HydraConfig.get().runtime.config_sources:
        search_path.append(source.provider, f"{source.schema}://{source.path}")
    return ConfigRepository(search_path)


def _leaves(config: Any, path: str = "") -> Iterator[str]:
    for key in config:
        name = f"{path}.{key!s}" if path else str(key)
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _leaves(node, name)
        else:
            yield name
