"""A plugin: what Hydra and OmegaConf read is parsed once a process, and a correction composed once.

Parsing verl's thirty files in Python is half of what a composition takes, and parsing the same interpolations anew a
third of what the start-up checks of a configuration take. OmegaConf copies the YAML that it is given and only visits
the tree of an interpolation, so that both can be shared.

Without a launch a correction is composed from the shipped files alone, so that equal overrides compose equal values:
the same few are asked for by each page and each table of a recording.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import omegaconf._utils
import omegaconf.base
import pytest
import yaml
from omegaconf import grammar_parser

from recipe.offpolicy.analysis.whatif import compose


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


@pytest.fixture(autouse=True, scope="session")
def _composed_once() -> Iterator[None]:
    composed = compose.compose
    known: dict[tuple[str, ...], Any] = {}

    def compose_once(name: str, overrides: Sequence[str], **options: Any) -> Any:
        key = (name, *overrides)
        if key not in known:
            known[key] = composed(name, overrides=list(overrides), **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "compose", compose_once)
        yield
