"""Overrides of keys that the composed configuration does not have, found all at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ..correction import Problem

# Several names below a section, without a sign: no group, no addition and no deletion.
_PLAIN = re.compile(r"(?P<key>[A-Za-z_]\w*(?:\.[\w-]+)+)\s*=(?P<value>.*)", re.S)
_ADDED = re.compile(r"\+[A-Za-z_]\w*(\.[\w-]+)+\s*=")
_FREE = re.compile(r"kwargs|override|env_vars|extra")
"""Names of sections in which verl takes any key."""
_CLOSE = 0.85
_TARGET = "_target_"
_ENGINE, _MEGATRON = "model_engine", "megatron"

Compose = Callable[[list[str]], DictConfig]
"""Composes the configuration with these overrides."""


def find_unknown_keys(compose: Compose, overrides: Sequence[str], owner: str, *, verls: bool = True) -> list[Problem]:
    """Find the overrides for which a configuration has no key.

    Args:
        compose: of the same program, with other overrides.
        overrides: with which it does not compose.
        owner: whose configuration it is, such as "verl 0.9.1".
        verls: whether the program is of the installed verl, or made for it, as ours is.
    """
    plain = [found for each in overrides if (found := _PLAIN.fullmatch(each)) is not None]
    if not plain:
        return []
    try:
        # A + on a key that exists fails too, and must not hide the unknown keys: ++ works for both.
        others = [each for each in overrides if _PLAIN.fullmatch(each) is None]
        config = compose([f"+{each}" if _ADDED.match(each) else each for each in others])
    except (HydraException, OmegaConfBaseException):
        return []
    return [problem for found in plain for problem in _check_key(config, found["key"], found["value"], owner, verls)]


def _check_key(config: DictConfig, key: str, value: str, owner: str, verls: bool) -> Iterator[Problem]:
    names = key.split(".")
    if names[0] == "hydra":
        return
    node: object = config
    for depth, name in enumerate(names):
        if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
            return
        if name not in list(node):  # "in" leaves out what is still to be given
            yield Problem(
                "", None, f"{key}={value}: {owner} has no such key.", _build_fix(config, node, names, depth, verls)
            )
            return
        node = node._get_node(name)


def _build_fix(config: DictConfig, section: DictConfig, names: Sequence[str], depth: int, verls: bool) -> str:
    of_megatron = names[depth] == _MEGATRON or (_MEGATRON in names and _TARGET not in section)
    if of_megatron and _ENGINE in config and config[_ENGINE] != _MEGATRON:
        return f"Set {_ENGINE}={_MEGATRON}, which brings it, or leave it out."
    if not len(section) or any(map(_FREE.search, names[:depth])):
        return f"Write +{'.'.join(names)}: any key can be added there."
    known = [str(name) for name in section]
    near = [".".join([*names[:depth], name]) for name in difflib.get_close_matches(names[depth], known, 1, _CLOSE)]
    near += [names[-1]] if names[-1] in config else []
    instead = f", or set {near[0]}" if near else ""
    if not verls:
        return f"Leave it out{instead}, or install the verl that the program is made for."
    # verl makes dataclasses of its sections that name one, which take no further keys.
    refused = "verl refuses it with a + too" if _TARGET in section else "with a + nothing of verl would read it"
    return f"Leave it out{instead}; {refused}."
