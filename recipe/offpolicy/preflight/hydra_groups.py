"""The Hydra group ``correction``: look up options, reject conflicting or deleted options, and restore their values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

# There is no public call that lists or reads a group's options before, or without, composing them.
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_patches.hydra_sections import GROUPS
from verl_patches.moved_options import MOVED, describe_moved

from ..batch.declared_keys import flatten
from ..correction import Problem, SpecError
from ..correction.problem import CheckError, find_closest, format_value, set_to
from ..correction.validation import read_numbers
from ..extensions.add_on import SHIPPED
from .hydra_refusals import find_malformed_choices, list_nested
from .own_keys import CONFIG_DIR, find_similar_keys, list_groups, list_sections

GROUP = "correction"
AUTO = "auto"
EMPTY = frozenset({"none", "resampling", "verl/disabled"})
"""Options that select no correction."""
_MISSING = "???"
_NAMES = ("upper", "delta", "budget", "coefficient")
"""Keys to which a single number given for a whole part may refer, if the option sets one of them in that part."""


def force_own_keys(arguments: Sequence[str]) -> list[str]:
    """Prefix overrides of our own keys with ``++``, so that our checks, not Hydra, report unknown ones.

    ``correction.masks.gsm.low=1`` becomes ``++correction.masks.gsm.low=1``, so that the message lists the known keys
    instead of suggesting how to append an unknown one. The plus is removed from our groups, as in ``+opd=loss``: Hydra
    already has the group in its defaults list, and therefore rejects the plus.

    Raises:
        SpecError: ``correction=null``, on which Hydra fails without naming the key; or two ``correction=`` overrides or
            two options of one extension, in which case Hydra would use only the last.
        CheckError: keys that resemble ours, which Hydra would suggest appending, or keys of ours with an empty value.
    """
    if problems := [
        *find_similar_keys(arguments),
        *_find_empty(arguments),
        *find_malformed_choices(arguments, list_groups()),
    ]:
        raise CheckError(problems)
    sections = list_sections()
    group = re.compile(rf"\+*({'|'.join(sections)})\s*=(?!\s*\{{)")
    arguments = [each.lstrip("+") if group.match(each) else each for each in arguments]
    bare = [argument.replace(" ", "") for argument in arguments]
    for section in (GROUP, *SHIPPED):
        chosen = [argument for argument in bare if argument.startswith(f"{section}=")]
        values = [argument.partition("=")[2] for argument in chosen]
        options = [option for value in values for option in value.strip("[]").split(",")]
        if section == GROUP and "null" in map(str.lower, values):
            raise _build_no_group_error()
        if section == GROUP and len(chosen) > 1:
            raise _build_several_error(chosen, "Hydra would take the last")
        if section != GROUP and len(options) > 1:  # these options are alternative modes
            reason = f"options of {section} do not stack, and Hydra would use only the last."
            raise SpecError(reason, f"Choose one of them: {section}={options[-1]}.", key=section, value=options)
    ours = tuple(f"{section}." for section in sections - SHIPPED.keys())
    return [f"++{each}" if each.startswith(ours) else each for each in arguments]


def _find_empty(arguments: Sequence[str]) -> Iterator[Problem]:
    """Find our keys that have an empty value, which usually results from an unset shell variable."""
    for argument in arguments:
        key, given, value = argument.lstrip("+").partition("=")
        if given and not value.strip() and key.strip().split(".")[0] in list_sections():
            options = list_groups().get(key.strip(), ())
            named = ", ".join(options) if len(options) < 10 else "docs/corrections.md lists them"
            fix = f"Name an option: {named}." if options else "Give a value."
            yield Problem(key.strip(), "", "empty, perhaps because a shell variable is not set.", fix, parts=())


def read_chosen_options() -> list[str]:
    """Read the chosen options of the group ``correction`` in the running application, e.g. ["tis_token", "opsm"].

    Returns ["none"] if neither the overrides nor the defaults contain the group, as with
    ``+offpolicy@offpolicy=default``.

    Raises:
        SpecError: the group was deleted, is an empty list, or is added several times.
    """
    given = [override for override in parse_overrides(read_task_overrides()) if override.key_or_group == GROUP]
    if len(given) > 1 and any(each.is_add() for each in given):  # Hydra composes all of them
        raise _build_several_error([str(each.input_line) for each in given], "Hydra would compose each of them")
    if given and not given[-1].is_delete():
        value = given[-1].value()
        if value == []:
            raise _build_no_group_error()
        return [str(option) for option in value] if isinstance(value, list) else [str(value)]
    if not given and (choice := HydraConfig.get().runtime.choices.get(GROUP)) is not None:
        return [str(choice)]
    # The primary configuration's defaults contain a list, which Hydra does not record in its choices.
    loader, name = GlobalHydra.instance().config_loader(), HydraConfig.get().job.config_name
    found = loader.compute_defaults_list(config_name=name, overrides=_read_overrides(), run_mode=RunMode.RUN)
    paths = [default.config_path or "" for default in found.defaults]
    options = [path.removeprefix(f"{GROUP}/") for path in paths if path.startswith(f"{GROUP}/")]
    if not options and (given or GROUP in HydraConfig.get().runtime.choices):
        raise _build_no_group_error()
    return options or ["none"]


def check_stack(options: Sequence[str]) -> None:
    """Check that no two stacked options set the same key, because Hydra would use the last.

    Raises:
        SpecError: two options set the same key; the message names the key and both options.
    """
    for option in options:
        if option in EMPTY | {AUTO} and len(options) > 1:
            fix = f"Leave {option} out, or choose it alone."
            raise SpecError(f"{option} with others.", fix, key=GROUP, value=list(options))
    owner: dict[str, str] = {}
    for option in options:
        leaves = flatten(load_option(option))
        for key in leaves:
            for seen, first in owner.items():
                if key == seen or key.startswith(f"{seen}.") or seen.startswith(f"{key}."):
                    reason = f"{first} and {option} both set {GROUP}.{key}."
                    raise SpecError(reason, "Choose one of them.", key=GROUP, value=list(options))
        owner.update(dict.fromkeys(leaves, option))


def load_option(option: str) -> dict[str, Any]:
    """Load the plain values of an option of the group ``correction`` from any source of the running application.

    Interpolations are not resolved, and values that the user must set remain "???".

    Raises:
        SpecError: there is no such option; the message names the existing options.
    """
    loaded = _build_repository().load_config(f"{GROUP}/{option}")
    if loaded is None:
        refuse_moved(GROUP, [option])
        near = find_closest(option, list_options(), 0.6)
        fix = f"Did you mean {near}?" if near else "docs/corrections.md explains all of them."
        raise SpecError("no such option.", fix, key=GROUP, value=option)
    return cast(dict[str, Any], OmegaConf.to_container(loaded.config, resolve=False))


def find_lost_values(config: DictConfig, overrides: Iterable[str]) -> Iterator[Problem]:
    """Find values of ``correction`` in the user's primary configuration that the chosen option replaces.

    Hydra composes an option from an override after the primary configuration.
    """
    name = HydraConfig.get().job.config_name if HydraConfig.initialized() else None
    primary = None if name is None else _build_repository().load_config(name)
    written = None if primary is None else OmegaConf.select(primary.config, GROUP)
    if not isinstance(written, DictConfig):
        return
    given = tuple(override.lstrip("+").partition("=")[0] for override in overrides)
    for leaf, mine in flatten(cast(dict[str, Any], OmegaConf.to_container(written, resolve=False))).items():
        key = f"{GROUP}.{leaf}"
        composed = OmegaConf.select(config, key, throw_on_resolution_failure=False)
        if "${" in str(mine) or mine == composed or any(key == each or key.startswith(f"{each}.") for each in given):
            continue  # an interpolation has a value only in the whole configuration
        replaced = f"the chosen option of {GROUP}, which is composed later, sets {format_value(composed)}."
        yield Problem(key, mine, f"{name} sets it, but {replaced}", overrides=(set_to(key, mine),), translated=True)


def list_options() -> list[str]:
    """List the options of the group ``correction`` that the running application finds."""
    return list_nested(_build_repository().get_group_options, GROUP)


def refuse_moved(key: str, options: Sequence[Any]) -> None:
    """Reject former option names in the list given for a key, unless the user's own options have these names.

    Raises:
        SpecError: a former name was used; the message gives the current name.
    """
    named = [each for each in options if isinstance(each, str) and each in MOVED]
    if named and (moved := sorted(set(named) - set(list_options()))):
        today = [MOVED[each] if each in moved else each for each in options]
        given, meant = (options, today) if len(options) > 1 else (options[0], today[0])
        raise SpecError(describe_moved(moved), key=key, value=given, meant={key: meant})


def filter_added(overrides: Iterable[str]) -> list[str]:
    """Return the overrides with ``+`` or ``++`` that do not select an option from one of our groups."""
    ours = {*list_groups(), *GROUPS}
    return [each for each in overrides if each.startswith("+") and _get_group(each) not in ours]


def _get_group(override: str) -> str:
    """Return the group name without package and value: ``correction`` for ``+correction@correction=gsm``."""
    return override.lstrip("+").partition("=")[0].partition("@")[0].strip()


def compose_without(left_out: Sequence[str]) -> DictConfig:
    """Compose the running application's configuration without some of its overrides."""
    return _compose([override for override in _read_overrides() if override not in left_out])


def recompose(options: Sequence[str], values: Mapping[str, float]) -> DictConfig:
    """Compose the node ``correction`` as if these options and values had been chosen.

    All other overrides still apply, including those that change values set by the options.
    """
    given = _read_overrides()
    # The override is kept as it was given, with a + if the primary configuration does not have the group.
    group = next((each.partition("=")[0] for each in given if _get_group(each) == GROUP), GROUP)
    others = [each for each in given if _get_group(each) != GROUP]
    chosen = [f"{key}={value}" for key, value in values.items()]
    return cast(DictConfig, _compose([*chosen, *others, f"{group}=[{','.join(options)}]"])[GROUP])


def _compose(overrides: list[str]) -> DictConfig:
    loader, name = GlobalHydra.instance().config_loader(), HydraConfig.get().job.config_name
    return loader.load_configuration(config_name=name, overrides=overrides, run_mode=RunMode.RUN)


def _build_several_error(chosen: Sequence[str], taken: str) -> SpecError:
    reason = f"correction is given {len(chosen)} times, and {taken}: {' '.join(chosen)}."
    names = ",".join(argument.partition("=")[2].replace(" ", "").strip("[]") for argument in chosen)
    return SpecError(reason, f"Stack options as '{chosen[-1].partition('=')[0]}=[{names}]'.")


def _build_no_group_error() -> SpecError:
    return SpecError("the group has no option.", "Set correction=none to train uncorrected.", key=GROUP)


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides as Hydra does."""
    return list(OverridesParser.create().parse_overrides(list(overrides)))


def brought_sections() -> bool:
    """Return True if one of our options added our sections to the running application."""
    return "offpolicy" in (HydraConfig.get().callbacks or {})


def read_task_overrides() -> list[str]:
    """Read the running application's overrides, without overrides of Hydra's own keys."""
    return _to_plain(HydraConfig.get().overrides.task)


def _read_overrides() -> list[str]:
    given = HydraConfig.get().overrides
    return [*_to_plain(given.hydra), *_to_plain(given.task)]


def _to_plain(overrides: Any) -> list[str]:
    # Overrides may contain interpolations, which are not resolved here.
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


def _build_repository() -> ConfigRepository:
    """Build a repository of all config sources; Hydra's own repository does not include ``hydra.searchpath``."""
    search_path = ConfigSearchPathImpl()
    for source in HydraConfig.get().runtime.config_sources:
        search_path.append(source.provider, f"{source.schema}://{source.path}")
    return ConfigRepository(search_path)


def restore_defaults(problem: Problem) -> Problem:
    """Return a problem whose overrides set its key to the value in the selected options.

    A problem that translates the user's value, or whose key no option sets, is returned unchanged.
    """
    if problem.translated or not problem.key.startswith(f"{GROUP}."):
        return problem
    default = _read_default(problem.key.split(".")[1:])
    whole_part = problem.key.count(".") == 1
    if default in (..., _MISSING, problem.value) or (whole_part and default is None):
        return problem
    if isinstance(default, Mapping):
        single = [name for name in ("lower", *_NAMES) if default.get(name) is not None]
        numbers = read_numbers(problem.value)
        if len(numbers) != 1 or len(single) != 1:  # None, or several values: only the user knows what was meant
            return problem
        default = {**default, single[0]: numbers[0]}
    return replace(problem, fix="", overrides=(set_to(problem.key, default),))


def _read_default(path: Sequence[str]) -> Any:
    """Read a key from the selected options, otherwise from the shipped base; ``...`` if neither contains it."""
    base: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "offpolicy_base.yaml"), resolve=False)
    try:
        values = [load_option(option) for option in read_chosen_options()]
    except SpecError:
        values = []
    for found in (*values, base[GROUP]):
        for name in path:
            found = found.get(name, ...) if isinstance(found, Mapping) else ...
        if found is not ...:
            return found
    return ...
