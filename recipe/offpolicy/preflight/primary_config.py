"""Checks that the primary configuration on the command line contains our sections and verl's search path."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from verl_patches.hydra_sections import GROUPS

from ..correction import SpecError

CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"
_OURS = {"dense": "offpolicy_trainer", "megatron": "offpolicy_megatron_trainer"}
_VERLS = ("ppo_trainer", "ppo_megatron_trainer")
_VERLS_FOLDER = ("verl", "trainer", "config")
_SECTIONS = "offpolicy_base"
_GROUP = "correction"
_SEARCH_PATH = re.compile(r"(?P<start>\+{0,2}hydra\.searchpath\s*=\s*\[)(?P<places>.*)\]\s*", re.S)
_BRINGS = re.compile(rf"\+({'|'.join(GROUPS)})@\1=")
"""An option that adds our sections to whatever primary configuration is used."""
_OPTION = "'+correction@correction=[...]'"
_NEEDED = "pkg://verl.trainer.config"


class _InvalidFlags(Exception):
    """Flags that Hydra's parser rejects; Hydra itself reports them."""


def check_primary(arguments: Sequence[str]) -> None:
    """Refuse a primary configuration that is not found or does not contain a section for a correction.

    Args:
        arguments: command-line arguments of our program.

    Raises:
        SpecError: the configuration is refused; the message names our configuration to use instead.
    """
    flags = _parse_flags(arguments)
    if flags is None or flags.config_name is None or any(map(_BRINGS.match, arguments)):
        return
    name = flags.config_name.removesuffix(".yaml")
    alongside = CONFIG_DIR if flags.config_path is None else CONFIG_DIR.parent / flags.config_path
    if flags.config_path is not None and "://" in flags.config_path:
        return
    folders = [*([Path(flags.config_dir)] if flags.config_dir else []), alongside]
    file = _find_file(name, folders)
    if name in _VERLS and (file is None or file.resolve().parts[-4:-1] == _VERLS_FOLDER):
        fix = f"Give --config-name={_OURS['megatron' if 'megatron' in name else 'dense']}, and no --config-path."
        reason = "verl's own primary configuration, which has no section for a correction."
        raise SpecError(reason, fix, key="--config-name", value=flags.config_name)
    if file is None:
        if any(map(_SEARCH_PATH.fullmatch, arguments)):
            return  # the added search path may lead to the file
        places = " or ".join(map(str, folders))
        fix = f"Name its folder with --config-dir, or launch the program that it belongs to, with {_OPTION}."
        raise SpecError(f"there is no such file in {places}.", fix, key="--config-name", value=flags.config_name)
    if not _has_sections(file, folders):
        reason = f"{file} has no section for a correction."
        fix = f"Give options of ours as {_OPTION}, which adds the sections to it."
        raise SpecError(reason, fix, key="--config-name", value=flags.config_name)


def keep_search_path(arguments: Sequence[str]) -> list[str]:
    """Add verl's configuration, on which ours is based, to a search path given by the user."""
    return [_add_verls(argument) for argument in arguments]


def _add_verls(argument: str) -> str:
    found = _SEARCH_PATH.fullmatch(argument)
    if found is None or _NEEDED in found["places"]:
        return argument
    places = [place for place in (found["places"].strip(), _NEEDED) if place]
    return f"{found['start']}{','.join(places)}]"


class _Flags:
    config_name: str | None
    config_path: str | None
    config_dir: str | None


def _parse_flags(arguments: Sequence[str]) -> _Flags | None:
    # Hydra's own parser is not public. Only these flags matter; --cfg is listed so that -c does not abbreviate another.
    parser = argparse.ArgumentParser(add_help=False)
    for short, flag in (("-cn", "--config-name"), ("-cp", "--config-path"), ("-cd", "--config-dir"), ("-c", "--cfg")):
        parser.add_argument(short, flag)

    def refuse(message: str) -> NoReturn:
        raise _InvalidFlags(message)

    parser.error = refuse  # type: ignore[method-assign]
    try:
        return cast(_Flags, parser.parse_known_args(list(arguments))[0])
    except _InvalidFlags:
        return None


def _find_file(name: str, folders: Sequence[Path]) -> Path | None:
    return next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)


def _has_sections(file: Path, folders: Sequence[Path], seen: frozenset[Path] = frozenset()) -> bool:
    """Return True if a configuration, or one of its defaults next to it, includes our sections."""
    try:
        content = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError):
        return True  # Hydra reports what is wrong with it
    if not isinstance(content, DictConfig) or file in seen:
        return False
    defaults = [*_list_defaults(content)]
    if _GROUP in content or {_GROUP, _SECTIONS} & set(defaults):
        return True
    inner = filter(None, (_find_file(name, [*folders, CONFIG_DIR]) for name in defaults))
    return any(_has_sections(each, folders, seen | {file}) for each in inner)


def _list_defaults(content: DictConfig) -> Iterator[str]:
    """List the names in a defaults list: configurations, and groups with a chosen option."""
    plain = cast(dict[str, Any], OmegaConf.to_container(content, resolve=False))
    for default in plain.get("defaults") or ():
        for name in default if isinstance(default, dict) else (default,):
            yield str(name).removeprefix("override ").split("@")[0].strip("/ ")
