"""What Hydra's composition hides: a correction group that is deleted, two options that set one key, and options that
are chosen after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from .correction import SpecError

GROUP = "correction"
AUTO = "auto"
EMPTY = frozenset({"none", "resampling", "verl_disabled"})
"""Options that mean no correction."""

_OURS = (f"{GROUP}.", "offpolicy.", "setup.")
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
    return [f"++{a}" if a.startswith(_OURS) else a for a in arguments]


def chosen_options() -> list[str]:
    """The options of the group ``correction`` in the running Hydra application, e.g. ["tis_token", "opsm"].

    Raises:
        SpecError: the group was deleted.
    """
    defaults: list[ResultDefault] = (
        _loader()
        .compute_defaults_list(
            config_name=HydraConfig.get().job.config_name, overrides=_overrides(), run_mode=RunMode.RUN
        )
        .defaults
    )
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
    for option in options:
        if option in EMPTY | {AUTO} and len(options) > 1:
            raise SpecError(
                f"correction=[{','.join(options)}]: {option} with others. Leave {option} out, or choose it alone."
            )
    repository = _repository()
    owner: dict[str, str] = {}
    for option in options:
        leaves = list(_leaves(_load(repository, option)))
        for key in leaves:
            for seen, first in owner.items():
                if key == seen or key.startswith(f"{seen}.") or seen.startswith(f"{key}."):
                    raise SpecError(
                        f"correction=[{','.join(options)}]: {first} and {option} both set {GROUP}.{key}. "
                        f"Choose one of them."
                    )
        owner.update(dict.fromkeys(leaves, option))


def option_values(option: str) -> dict[str, Any]:
    """The plain values of one option of the group ``correction``, from wherever the running application has it.

    Interpolations stay as they are written, and what the user has to give stays "???".

    Raises:
        SpecError: there is no such option; names those that there are.
    """
    return cast(dict[str, Any], OmegaConf.to_container(_load(_repository(), option), resolve=False))


def recomposed(options: Sequence[str]) -> DictConfig:
    """The node ``correction`` as it would be in the running application, had these options been chosen.

    Every other override keeps its say, also over the options' own values.
    """
    others = [override for override in _overrides() if not override.replace(" ", "").startswith(f"{GROUP}=")]
    config = _loader().load_configuration(
        config_name=HydraConfig.get().job.config_name,
        overrides=[*others, f"{GROUP}=[{','.join(options)}]"],
        run_mode=RunMode.RUN,
    )
    return cast(DictConfig, config[GROUP])


def _loader() -> Any:
    return GlobalHydra.instance().config_loader()


def _overrides() -> list[str]:
    given = HydraConfig.get().overrides
    return [*given.hydra, *given.task]


def _load(repository: ConfigRepository, option: str) -> DictConfig:
    loaded = repository.load_config(f"{GROUP}/{option}")
    if loaded is None:
        known = ", ".join(repository.get_group_options(GROUP))
        raise SpecError(f"{GROUP}={option}: no such option. Choose one of {known}.")
    return cast(DictConfig, loaded.config)


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
