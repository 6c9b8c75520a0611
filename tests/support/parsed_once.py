"""A plugin: what Hydra and OmegaConf read is parsed once a process, YAML and interpolations alike.

Parsing verl's thirty files in Python is half of what a composition takes, and parsing the same interpolations anew a
third of what the start-up checks of a configuration take. OmegaConf copies the YAML that it is given and only visits
the tree of an interpolation, so that both can be shared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import omegaconf._utils
import omegaconf.base
import pytest
import yaml
from omegaconf import grammar_parser


@pytest.fixture(autouse=True, scope="session")
def _parsed_once() -> Iterator[None]:
    parse = yaml.load
    known: dict[str, Any] = {}

    def load(stream: Any, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader":
            return parse(stream, Loader)
        text = stream if isinstance(stream, str) else stream.read()
        if text not in known:
            known[text] = parse(text, Loader)
        return known[text]

    interpolation = functools.lru_cache(maxsize=None)(grammar_parser.parse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "load", load)
        for module in (omegaconf.base, omegaconf._utils):
            patch.setattr(module, "parse", interpolation)
        yield
