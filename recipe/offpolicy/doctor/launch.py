"""The launch under examination: its program, its arguments, and the configuration that Hydra composes from them."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

# hydra.compose supports neither flags nor hydra.* overrides of a job, nor the search path of another program's main.
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, detect_task_name, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_patches.contract import demand_release, installed_release
from verl_patches.hydra_sections import bring_sections

from ..preflight.hydra_groups import force_own_keys
from ..preflight.hydra_refusals import NO_DEFAULT, check_primary, explain_refusal, keep_search_path, list_nested, parse
from ..preflight.own_keys import CONFIG_DIR
from ..preflight.python_source import OURS, VERLS
from .program import HydraMain, Launch, LaunchError, find_program
from .unknown_keys import find_unknown_keys

OUR_PROGRAM = HydraMain(CONFIG_DIR.parent / "main_offpolicy.py", str(CONFIG_DIR), "offpolicy_trainer")
_CHECK = "--check"
_SEVERAL = "--multirun: only a single run can be checked. Give one value per key, and check each launch separately."
_FROM_HERE = re.compile(r"path=file://([^/\s]\S*)")
"""A relative entry of a search path, relative to the current directory."""

_VERLS, _INSTALLED = "verl/trainer/config", "hydra.searchpath=[pkg://verl.trainer.config]"
"""Where verl's programs find their configuration files: in a checkout, and in an installed verl."""
_CONFIG_CLASS = re.compile(r"verl(\.\w+)*\.[A-Z]\w*(Config|Cfg)")


class UnknownKeysError(LaunchError):
    """Raised if overrides set keys that the configuration does not have."""


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """Prepare the arguments of this package's program for Hydra.

    Raises:
        SpecError, CheckError: the primary configuration lacks its sections, or a choice of options is malformed.
    """
    check_primary(parse_flags(arguments))
    bring_sections()
    return keep_search_path(force_own_keys(arguments))


def compose(launch: Launch) -> DictConfig:
    """Compose the configuration that the launch would train with, in this process's Hydra application.

    Raises:
        PatchError: verl is missing, or its release is not supported.
        LaunchError: the program does not exist, or Hydra rejects its arguments.
        SpecError, CheckError: see ``prepare_arguments``.
    """
    demand_release()
    program, given = OUR_PROGRAM, [argument for argument in launch.arguments if argument != _CHECK]
    arguments = parse_flags(given)
    if launch.module == OURS:
        arguments = parse_flags(prepare_arguments(given))
    else:
        program = find_program(launch.module)
        program.demand(arguments)
    name = arguments.config_name or program.config_name
    path = arguments.config_path or program.config_path
    try:
        # As with `python -m`, a relative path is relative to the program's file.
        search_path = create_automatic_config_search_path(str(program.file), None, path)
        if arguments.config_dir is not None:
            _prepend(search_path, arguments.config_dir)
        GlobalHydra.instance().clear()
        hydra = Hydra.create_main_hydra2(detect_task_name(str(program.file), None), search_path)
        config = _compose_with(hydra, name, arguments.overrides)
    except LaunchError:
        raise
    except Exception as error:  # Hydra passes on errors of its grammar, OmegaConf and Python
        raise _explain(error, launch, name, arguments.overrides) from error
    _refuse_missing_places(config, arguments.overrides)
    if OmegaConf.select(config, "hydra.mode") == RunMode.MULTIRUN:
        raise LaunchError(_SEVERAL)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    if launch.origin:
        _refuse_targets(config)
    return config


def _refuse_missing_places(config: DictConfig, overrides: Sequence[str]) -> None:
    """Reject entries of the command line's search path that do not exist; Hydra would ignore them."""
    if not any(each.lstrip("+").startswith("hydra.searchpath") for each in overrides):
        return
    for place in config.hydra.searchpath:
        path = ConfigSearchPathImpl()
        path.append("command-line", str(place))
        if not all(source.available() for source in ConfigRepository(path).get_sources()):
            reason = f"no such folder or package exists when resolved from {os.getcwd()}."
            raise LaunchError(
                f"hydra.searchpath={place}: {reason} Correct it, or run the doctor from the launch directory."
            )


def _refuse_targets(config: DictConfig) -> None:
    """Reject targets that verl would call with values from the launch, except verl's configuration classes."""
    nodes: list[tuple[str, object]] = [("", OmegaConf.to_container(config, resolve=False))]
    while nodes:
        place, node = nodes.pop()
        below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for name, value in below:
            key = f"{place}.{name}" if place else str(name)
            nodes.append((key, value))
            if name == "_target_" and value is not None and not _CONFIG_CLASS.fullmatch(str(value)):
                raise LaunchError(
                    f"{key}={value}: the doctor does not call code that a script names, so it cannot check this "
                    "launch. Fix: run the doctor in the folder of that code, and pass it the overrides of the launch "
                    "instead of --script."
                )


def _explain(error: Exception, launch: Launch, name: str | None, overrides: list[str]) -> LaunchError:
    """Explain why Hydra cannot compose the configuration: because of unknown keys, or because of another error."""
    hydra = GlobalHydra.instance().hydra
    if hydra is None:
        return LaunchError(_add_places(explain_refusal(error, overrides, lambda group: ()), error))
    of_group = isinstance(error, OverrideParseException) or NO_DEFAULT in str(error)
    if not of_group and all(parse(each) is not None for each in overrides):
        verls = launch.ours or launch.module in VERLS
        owner = f"verl {installed_release('verl')}" if verls else f"the configuration of {launch.module}"
        if unknown := find_unknown_keys(partial(_try_with, hydra, name), overrides, owner, verls=verls):
            return UnknownKeysError("\n".join(map(str, unknown)))
    get_options = partial(list_nested, partial(hydra.config_loader.get_group_options, config_name=name))
    return LaunchError(_add_places(explain_refusal(error, overrides, get_options), error))


def _compose_with(hydra: Hydra, name: str | None, overrides: list[str]) -> DictConfig:
    return hydra.compose_config(
        config_name=name, overrides=overrides, run_mode=RunMode.RUN, with_log_configuration=False, from_shell=False
    )


def _try_with(hydra: Hydra, name: str | None, overrides: list[str]) -> DictConfig:
    """Compose like ``_compose_with``, and raise a Hydra exception for any error."""
    try:
        return _compose_with(hydra, name, overrides)
    except (TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
        raise HydraException(str(error)) from error


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments as Hydra does: flags may precede or follow all overrides.

    Returns:
        The flags of Hydra; ``overrides``; and ``shows``, which is True if Hydra only prints something and runs nothing.

    Raises:
        LaunchError: Hydra rejects the arguments, or would run something that is not checked.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        among = message.removeprefix("unrecognized arguments: ")
        if among != message:
            raise LaunchError(f"{among}: Hydra accepts flags only before or after all overrides. Move the flags.")
        raise LaunchError(f"{message}.")

    parser.error = refuse  # type: ignore[method-assign]
    flags = parser.parse_args(list(arguments))
    if flags.multirun:
        raise LaunchError(_SEVERAL)
    if flags.experimental_rerun is not None:
        raise LaunchError("--experimental-rerun trains a stored configuration, which is not checked. Remove the flag.")
    if flags.resolve and flags.cfg is None:
        raise LaunchError("--resolve requires --cfg. Remove --resolve, or add --cfg job.")
    if flags.run + (flags.cfg is not None) + flags.shell_completion + (flags.info is not None) > 1:
        raise LaunchError("--run, --cfg, --info and --shell-completion: Hydra accepts only one of them. Keep one.")
    flags.shows = bool(flags.cfg or flags.info or flags.shell_completion or flags.hydra_help)
    return flags


def _prepend(search_path: ConfigSearchPath, folder: str) -> None:
    absolute = os.path.abspath(folder)
    if not os.path.isdir(absolute):
        raise LaunchError(f"--config-dir={folder}: there is no such folder.")
    search_path.prepend(provider="command-line", path=f"file://{absolute}", anchor=SearchPathQuery(provider="schema"))


def _add_places(said: str, error: BaseException | None) -> str:
    """Add to an error message the relative entries of the search path that do not exist here."""
    whole = ""
    while error is not None:
        whole, error = f"{whole}\n{error}", error.__cause__
    places = [each for each in dict.fromkeys(_FROM_HERE.findall(whole)) if not os.path.isdir(each)]
    if places:
        said += (
            f"\n{' and '.join(places)} does not exist in {os.getcwd()}. Fix: run the doctor from the launch directory"
        )
        said += f", or append {shlex.quote(_INSTALLED)}." if _VERLS in places else "."
    return said
