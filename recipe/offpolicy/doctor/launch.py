"""The launch under examination: its program, its arguments, and the configuration that Hydra composes of them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

# hydra.compose takes no flags, no hydra.* overrides of a job, and no search path of another program's main.
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, detect_task_name, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_patches.contract import PatchError, demand_release, installed_release

from ..correction import SpecError
from ..correction.problem import CheckError
from ..preflight.checks.module_source import find_source
from ..preflight.hydra_groups import force_own_keys
from ..preflight.primary_config import CONFIG_DIR, check_primary, keep_search_path
from .hydra_main import HydraMain, read_hydra_main
from .unknown_keys import find_unknown_keys

OURS = "recipe.offpolicy.main_offpolicy"
VERLS = ("verl.trainer.main_ppo",)
"""Programs of verl whose trainers and workers the checks know."""
_OUR_CONFIGURATION = HydraMain(CONFIG_DIR.parent / "main_offpolicy.py", str(CONFIG_DIR), "offpolicy_trainer")
_CHECK = "--check"
_FROM_HERE = re.compile(r"path=file://([^/\s]\S*)")
"""A relative place of a search path, resolved from the current directory."""

_CONFIG_CLASS = re.compile(r"verl(\.\w+)*\.[A-Z]\w*Config")


class LaunchError(ValueError):
    """A launch whose configuration cannot be composed; the message says why, and names the key if there is one."""


class UnknownKeysError(LaunchError):
    """Overrides of keys that the configuration does not have."""


@dataclass(frozen=True)
class Launch:
    """A program with its arguments.

    Attributes:
        module: the program, as ``python -m`` names it.
        arguments: Hydra's flags and overrides.
        origin: the script and line that it was read from; "" for the command line.
    """

    module: str
    arguments: tuple[str, ...]
    origin: str = ""

    @property
    def ours(self) -> bool:
        """True for this recipe's own program."""
        return self.module == OURS

    @property
    def overrides(self) -> tuple[str, ...]:
        """The arguments that are not flags."""
        return tuple(argument for argument in self.arguments if not argument.startswith("-"))


def compose(launch: Launch) -> DictConfig:
    """Compose the configuration that the launch would train with, in this process's Hydra application.

    Raises:
        PatchError: verl is missing, or its release is not supported.
        LaunchError: there is no such program, or Hydra does not take its arguments.
        SpecError: ``correction=null``, two ``correction=``, or a primary configuration without our sections.
    """
    demand_release()
    program = _OUR_CONFIGURATION if launch.ours else _find_program(launch.module)
    given = [argument for argument in launch.arguments if argument != _CHECK]
    if launch.ours:
        check_primary(given)
        given = keep_search_path(force_own_keys(given))
    arguments = _parse(given)
    if arguments.multirun:
        raise LaunchError("--multirun: several runs, and the doctor checks one. Fix: give one value of each key.")
    name = arguments.config_name or program.config_name
    path = arguments.config_path or program.config_path
    try:
        # As `python -m` does: a relative path is one beside the program's file.
        search_path = create_automatic_config_search_path(str(program.file), None, path)
        if arguments.config_dir is not None:
            _prepend(search_path, arguments.config_dir)
        GlobalHydra.instance().clear()
        hydra = Hydra.create_main_hydra2(detect_task_name(str(program.file), None), search_path)
    except (HydraException, OmegaConfBaseException) as error:
        raise LaunchError(_format_error(error)) from error
    try:
        config = _compose_with(hydra, name, arguments.overrides)
    except OverrideParseException as error:
        raise LaunchError(f"{error.override}: Hydra cannot read this override. {_format_error(error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        verls = launch.ours or launch.module in VERLS
        owner = f"verl {installed_release('verl')}" if verls else f"the configuration of {launch.module}"
        compose = partial(_compose_with, hydra, name)
        if unknown := find_unknown_keys(compose, arguments.overrides, owner, verls=verls):
            raise UnknownKeysError("\n".join(map(str, unknown))) from error
        raise LaunchError(_format_error(error)) from error
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    if launch.origin:
        _refuse_targets(config)
    return config


def _refuse_targets(config: DictConfig) -> None:
    """Refuse what verl would call with the launch's values, unless it is a class of verl's configuration."""
    nodes: list[tuple[str, object]] = [("", OmegaConf.to_container(config, resolve=False))]
    while nodes:
        place, node = nodes.pop()
        below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for name, value in below:
            key = f"{place}.{name}" if place else str(name)
            nodes.append((key, value))
            if name == "_target_" and value is not None and not _CONFIG_CLASS.fullmatch(str(value)):
                raise LaunchError(
                    f"{key}={value}: code that a script names is not called, so that its launch is not checked. "
                    f"Fix: check the launch by its overrides, without --script, in the folder of its code."
                )


def explain_unknown_keys(arguments: Sequence[str]) -> str:
    """Explain overrides of our program that name keys unknown to verl, with the fix; "" if there are none."""
    try:
        compose(Launch(OURS, tuple(arguments)))
    except UnknownKeysError as error:
        return str(error)
    except (LaunchError, PatchError, SpecError, CheckError):
        return ""
    return ""


def _compose_with(hydra: Hydra, name: str | None, overrides: list[str]) -> DictConfig:
    return hydra.compose_config(
        config_name=name, overrides=overrides, run_mode=RunMode.RUN, with_log_configuration=False, from_shell=False
    )


def _find_program(module: str) -> HydraMain:
    path = find_source(module)
    if path is None:
        raise LaunchError(f"{module}: no such program is found. Install it, or go to where it is launched from.")
    found = read_hydra_main(path)
    if found is None:
        raise LaunchError(f"{module}: {path} has no @hydra.main, so that it takes no overrides.")
    return found


class _ParsedArguments:
    multirun: bool
    config_name: str | None
    config_path: str | None
    config_dir: str | None
    overrides: list[str]


def _parse(arguments: list[str]) -> _ParsedArguments:
    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise LaunchError(f"{' '.join(arguments)}: {message}.")

    parser.error = refuse  # type: ignore[method-assign, assignment]
    # argparse takes overrides in one run only; flags may stand among them.
    return cast(_ParsedArguments, parser.parse_intermixed_args(arguments))


def _prepend(search_path: ConfigSearchPath, folder: str) -> None:
    absolute = os.path.abspath(folder)
    if not os.path.isdir(absolute):
        raise LaunchError(f"--config-dir={folder}: there is no such folder.")
    search_path.prepend(provider="command-line", path=f"file://{absolute}", anchor=SearchPathQuery(provider="schema"))


def _format_error(error: BaseException | None) -> str:
    """Format Hydra's message with its causes."""
    said: list[str] = []
    while error is not None:
        if (text := str(error).strip()) and text not in said:
            said.append(text)
        error = error.__cause__
    whole = "\n".join(said)
    places = [each for each in dict.fromkeys(_FROM_HERE.findall(whole)) if not os.path.isdir(each)]
    if places:
        whole += f"\nThere is no {' and no '.join(places)} here, in {os.getcwd()}. Fix: ask from where it is launched."
    return whole
