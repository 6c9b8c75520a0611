"""What Hydra's composition hides: a correction group that is deleted, two options that set one key, and options that
are chosen after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

# No public call lists and reads the options of a group before, or without, composing them.
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ..correction import SpecError
from ..correction.problem import CheckError
from .similar_keys import find_similar_keys

GROUP = "correction"
AUTO = "auto"
EMPTY = frozenset({"none", "resampling", "verl_disabled"})
"""Options that mean no correction."""

_OURS = (f"{GROUP}.", "offpolicy.", "setup.")


def own_keys_for_us(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments in which Hydra leaves unknown keys of ours to our own checks.

    ``correction.masks.gsm.low=1`` becomes ``++correction.masks.gsm.low=1``, so that the answer is the known keys
    instead of the advice to append an unknown one.

    Raises:
        SpecError: ``correction=null``, on which Hydra fails without naming the key, or two ``correction=``, of which
            Hydra would take the last.
        CheckError: keys that resemble ours, which Hydra advises to append.
    """
    if similar := list(find_similar_keys(arguments, _shipped_options())):
        raise CheckError(similar)
    bare = [argument.replace(" ", "") for argument in arguments]
    chosen = [argument for argument in bare if argument.startswith(f"{GROUP}=")]
    if any(argument.lower() in {"correction=null", "correction="} for argument in chosen):
        raise _no_group()
    if len(chosen) > 1:
        reason = f"correction is given {len(chosen)} times, and Hydra would take the last: {' '.join(chosen)}."
        raise SpecError(reason, "Stack options as 'correction=[one,other]'.")
    return [f"++{a}" if a.startswith(_OURS) else a for a in arguments]


def _shipped_options() -> list[str]:
    return sorted(path.stem for path in (Path(__file__).parents[1] / "config" / GROUP).glob("*.yaml"))


def chosen_options() -> list[str]:
    """The options of the group ``correction`` in the running Hydra application, e.g. ["tis_token", "opsm"].

    Raises:
        SpecError: the group was deleted, or is an empty list.
    """
    given = [override for override in parsed(overrides_of_task()) if override.key_or_group == GROUP]
    if given and not given[-1].is_delete():
        value = given[-1].value()
        if value == []:
            raise _no_group()
        return [str(option) for option in value] if isinstance(value, list) else [str(value)]
    if not given and (choice := HydraConfig.get().runtime.choices.get(GROUP)) is not None:
        return [str(choice)]
    # A list in the defaults of the primary configuration, which Hydra notes nowhere.
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
        raise _no_group()
    return options


def check_stack(options: Sequence[str]) -> None:
    """Two options that set one key: Hydra lets the last one win, here it is an error.

    Raises:
        SpecError: names the key and both options.
    """
    for option in options:
        if option in EMPTY | {AUTO} and len(options) > 1:
            fix = f"Leave {option} out, or choose it alone."
            raise SpecError(f"{option} with others.", fix, key=GROUP, value=list(options))
    repository = _repository()
    owner: dict[str, str] = {}
    for option in options:
        leaves = list(_leaves(_load(repository, option)))
        for key in leaves:
            for seen, first in owner.items():
                if key == seen or key.startswith(f"{seen}.") or seen.startswith(f"{key}."):
                    reason = f"{first} and {option} both set {GROUP}.{key}."
                    raise SpecError(reason, "Choose one of them.", key=GROUP, value=list(options))
        owner.update(dict.fromkeys(leaves, option))


def option_values(option: str) -> dict[str, Any]:
    """The plain values of one option of the group ``correction``, from wherever the running application has it.

    Interpolations stay as they are written, and what the user has to give stays "???".

    Raises:
        SpecError: there is no such option; names those that there are.
    """
    return cast(dict[str, Any], OmegaConf.to_container(_load(_repository(), option), resolve=False))


def options_of_group() -> list[str]:
    """Every option of the group ``correction`` that the running application finds."""
    return list(_repository().get_group_options(GROUP))


def added_overrides(overrides: Iterable[str]) -> list[str]:
    """Overrides that may add a key: with ``+``, or ``++``."""
    return [override for override in overrides if override.startswith("+")]


def without_overrides(left_out: Sequence[str]) -> DictConfig:
    """The configuration of the running application as it would be without some of its overrides."""
    kept = [override for override in _overrides() if override not in left_out]
    return _loader().load_configuration(
        config_name=HydraConfig.get().job.config_name, overrides=kept, run_mode=RunMode.RUN
    )


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


def _no_group() -> SpecError:
    return SpecError("nothing says what is meant.", "Set correction=none to train uncorrected.", key=GROUP)


def _loader() -> Any:
    return GlobalHydra.instance().config_loader()


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them."""
    return list(OverridesParser.create().parse_overrides(list(overrides)))


def overrides_of_task() -> list[str]:
    """The overrides of the running application, but for Hydra's own."""
    return _plain(HydraConfig.get().overrides.task)


def _overrides() -> list[str]:
    given = HydraConfig.get().overrides
    return [*_plain(given.hydra), *_plain(given.task)]


def _plain(overrides: Any) -> list[str]:
    # They may hold interpolations, which are not resolved here.
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


def _load(repository: ConfigRepository, option: str) -> DictConfig:
    loaded = repository.load_config(f"{GROUP}/{option}")
    if loaded is None:
        known = ", ".join(repository.get_group_options(GROUP))
        raise SpecError("no such option.", f"Choose one of {known}.", key=GROUP, value=option)
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
